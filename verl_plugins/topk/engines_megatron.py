"""verl's Megatron engine with the trust region measured in its logits processor, over a sharded vocabulary.

Shapes: N response tokens on this rank, K listed tokens, M packed rows, V vocabulary entries of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from tensordict import TensorDict
from torch import Tensor
from verl.models.mcore.util import preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_plugins.losses.trust_region import TrustRegion
from verl_plugins.registrations import completed
from verl_plugins.topk.bound_loss import ANCHOR_LISTS, WANTS_ANCHOR_LISTS, BoundLoss, bind_loss
from verl_plugins.topk.gather import (
    ListedDistribution,
    distribution_from_log_prob,
    listed_logits,
    sampled_index,
    vocabulary_pass,
)
from verl_plugins.topk.measure import anchor_lists, measure
from verl_plugins.topk.packing import ResponseRows, anchor_inputs, response_rows


class TrustRegionMegatronEngine(MegatronEngineWithLMHead):
    """Megatron engine that measures divergence and direction for our policy losses.

    The logits are read before verl's own processor: its vocabulary-parallel cross-entropy overwrites them. Needs packed
    sequences (`use_remove_padding`); context parallelism and FP8 padding are followed by packing an index the same way.
    """

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Wrap one of our losses for this mini-batch, and add its metrics where this rank computed the loss."""
        bound = bind_loss(loss_function)
        if bound is None or forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only)
        output = super().forward_backward_batch(data, bound, forward_only)
        metrics = bound.metrics(data, self, self.get_data_parallel_group())
        if metrics:
            output["metrics"].update({name: [value] for name, value in metrics.items()})
        return output

    def _lm_head_logits_processor(
        self,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        logits_processor_func: Any,
        batch: TensorDict,
        data_format: str,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        region = logits_processor_func.region if isinstance(logits_processor_func, BoundLoss) else None
        wants_anchor = bool(tu.get_non_tensor_data(data=batch, key=WANTS_ANCHOR_LISTS, default=False))
        passed = {"logits_processor_func": logits_processor_func, "batch": batch, "data_format": data_format, **kwargs}
        if not wants_anchor and (region is None or not region.needs_topk):
            result: dict[str, Tensor] = super()._lm_head_logits_processor(logits, label, temperature, **passed)
            return result
        if data_format != "thd":
            raise ValueError(
                "verl_plugins: top-K divergences need packed sequences under Megatron; set "
                "actor_rollout_ref.model.use_remove_padding=true."
            )
        rows = self._local_rows(logits, temperature, batch)
        group = mpu.get_tensor_model_parallel_group()
        if wants_anchor:
            lists_NK1 = anchor_lists(rows.logits_MV, rows.row_N, rows.ids_NK, rows.temperature_N, group)
            result = super()._lm_head_logits_processor(logits, label, temperature, **passed)
            return {**result, ANCHOR_LISTS: _spread(lists_NK1, rows)}
        assert region is not None
        law, result = self._law_and_outputs(region, rows, group, (logits, label, temperature), passed)
        anchor_NK, anchor_tail_N = anchor_inputs(batch, region, rows)
        measures = measure(
            region,
            law,
            ids_NK=rows.ids_NK,
            sampled_N=rows.sampled_N,
            anchor_logp_NK=anchor_NK,
            anchor_log_tail_N=anchor_tail_N,
            vocab_size=self.model_config.hf_config.get_text_config().vocab_size,
        )
        return {**result, **{name: _spread(value_N, rows) for name, value_N in measures.named()}}

    def _law_and_outputs(
        self,
        region: TrustRegion,
        rows: ResponseRows,
        group: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        passed: dict[str, Any],
    ) -> tuple[ListedDistribution, dict[str, Tensor]]:
        """Read what is needed before verl's processor overwrites the logits, run it, and finish from its log-probs."""
        place = (rows.ids_NK, rows.temperature_N, group, rows.row_N)
        if region.needs_vocabulary_pass:
            law = vocabulary_pass(rows.logits_MV, *place)
            return law, super()._lm_head_logits_processor(*inputs, **passed)
        listed_NK = listed_logits(rows.logits_MV, *place)
        result: dict[str, Tensor] = super()._lm_head_logits_processor(*inputs, **passed)
        # Megatron's vocabulary-parallel cross-entropy works in float32 whatever the logits are.
        logp_N = result["log_probs"].detach().squeeze(0)[rows.row_N]
        return distribution_from_log_prob(listed_NK, logp_N, sampled_index(rows.ids_NK, rows.sampled_N)), result

    def _local_rows(self, logits: Tensor, temperature: Tensor, batch: TensorDict) -> ResponseRows:
        """Find this rank's rows by packing each token's running number exactly as verl packs the tokens."""
        rows = response_rows(batch)
        number = torch.zeros_like(batch["input_ids"].values())
        number[rows.packed_N] = rows.order_N + 1
        nested = torch.nested.nested_tensor_from_jagged(number, batch["input_ids"].offsets())
        config = self.engine_config
        packed = preprocess_thd_engine(
            nested,
            pre_process=True,
            use_fp8_padding=getattr(self.tf_config, "fp8", None) in ("e4m3", "hybrid"),
            local_cp_size=tu.get_non_tensor_data(data=batch, key="local_cp_size", default=None),
            pad_to_length_bucket=config.pad_to_length_bucket if getattr(config, "pad_to_length", False) else None,
            cp_layout=self._layout(),
        )[0].squeeze(0)
        return rows.at(logits.squeeze(0), packed, temperature.squeeze(0))

    def _layout(self) -> str:
        variant = getattr(self.tf_config, "experimental_attention_variant", None)
        return "contiguous" if variant == "dsv4_hybrid" else "zigzag"


def _spread(value_N: Tensor, rows: ResponseRows) -> Tensor:
    """Put values of response rows into verl's packed layout, (1, M, ...), which it gathers and unpacks itself."""
    spread = value_N.new_zeros((rows.logits_MV.shape[0], *value_N.shape[1:]))
    spread[rows.row_N] = value_N
    return spread[None]


def register_megatron() -> None:
    """Register the engine for NVIDIA devices, ahead of verl's own, which has no vendor."""
    EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor="nvidia")(
        TrustRegionMegatronEngine
    )


completed(__name__)
