"""verl's FSDP engine, with the trust region measured inside the actor's forward from the logits that are there anyway.

The engine wraps the loss function verl hands it, so any trainer of verl works. Per micro-batch it measures, under
no_grad, a few scalars per response token and leaves them where the registered policy loss finds them; K-wide tensors
never outlive the forward.

Shapes: B sequences, N response tokens of the micro-batch in order, K listed tokens, M rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_plugins.registrations import completed
from verl_plugins.topk.bound_loss import ANCHOR_LISTS, WANTS_ANCHOR_LISTS, BoundLoss, bind_loss
from verl_plugins.topk.measure import anchor_lists, current_law, measure
from verl_plugins.topk.packing import ResponseRows, anchor_inputs, response_rows, to_nested


class TrustRegionFSDPEngine(FSDPEngineWithLMHead):
    """FSDP and FSDP2 engine that measures divergence and direction for our policy losses.

    With any other loss it is verl's engine, unchanged.
    """

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Wrap one of our losses for this mini-batch, and add its metrics to what verl reports."""
        bound = bind_loss(loss_function)
        if bound is None or forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only)
        output = super().forward_backward_batch(data, bound, forward_only)
        metrics = bound.metrics(data, self, self.get_data_parallel_group())
        output["metrics"].update({name: [value] for name, value in metrics.items()})
        return output

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Measure the response tokens of the micro-batch after verl has computed their log-probabilities."""
        result: dict[str, Any] = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        wants_anchor = bool(tu.get_non_tensor_data(data=micro_batch, key=WANTS_ANCHOR_LISTS, default=False))
        region = logits_processor_func.region if isinstance(logits_processor_func, BoundLoss) else None
        if not wants_anchor and (region is None or not region.needs_topk):
            return result
        rows = self._local_rows(output.logits, output_args, micro_batch)
        if wants_anchor:
            lists_NK1 = anchor_lists(rows.logits_MV, rows.row_N, rows.ids_NK, rows.temperature_N)
            result[ANCHOR_LISTS] = self._spread(lists_NK1, rows, output_args, micro_batch)
            return result
        assert region is not None
        logp_packed = result["log_probs"].values().detach()
        anchor_NK, anchor_tail_N = anchor_inputs(micro_batch, region, rows)
        law = current_law(
            region,
            logits_MV=rows.logits_MV,
            row_N=rows.row_N,
            temperature_N=rows.temperature_N,
            logp_sampled_N=logp_packed[rows.packed_N],
            ids_NK=rows.ids_NK,
            sampled_N=rows.sampled_N,
        )
        vocab_size = self.model_config.hf_config.get_text_config().vocab_size
        measures = measure(
            region,
            law,
            anchor_logp_NK=anchor_NK,
            anchor_log_tail_N=anchor_tail_N,
            vocab_size=vocab_size,
            ids_NK=rows.ids_NK,
            sampled_N=rows.sampled_N,
        )
        for name, value_N in measures.named():
            result[name] = self._spread(value_N, rows, output_args, micro_batch)
        return result

    def _local_rows(self, logits: Tensor, output_args: dict[str, Any], micro_batch: TensorDict) -> ResponseRows:
        """Find the rows of this rank's logits that predict a response token."""
        if isinstance(logits, DTensor):
            raise NotImplementedError(
                "verl_plugins: logits sharded over the vocabulary under FSDP are not supported; "
                "set actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=1 or use strategy=megatron."
            )
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        rows = response_rows(micro_batch)
        # verl knows when the temperature is 1 for all: dividing by it would be one more pass over the vocabulary.
        at_one = bool(output_args.get("temperature_is_one", False))
        if not packed:
            return rows.in_padded(logits, None if at_one else output_args["temperature"])
        start = 0
        if self.use_ulysses_sp:
            padded = logits.shape[-2] * get_ulysses_sequence_parallel_world_size()
            start = get_ulysses_sequence_parallel_rank() * (padded // get_ulysses_sequence_parallel_world_size())
        return rows.in_packed(logits.squeeze(0), None if at_one else output_args["temperature_rmpad"], start)

    def _spread(
        self, value_N: Tensor, rows: ResponseRows, output_args: dict[str, Any], micro_batch: TensorDict
    ) -> Tensor:
        """Scatter values of response rows over the packed sequence, gathered over sequence-parallel ranks."""
        width = value_N.shape[1:]
        if not tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            packed = value_N.new_zeros((int(micro_batch["input_ids"].values().shape[0]), *width))
            packed[rows.packed_N] = value_N
        else:
            local = value_N.new_zeros((rows.logits_MV.shape[0], *width))
            local[rows.row_N] = value_N
            packed = self._gather_and_unpad_packed(local, output_args["pad_size"])
        return to_nested(packed, micro_batch)


class _OnCPU:
    """verl gives forward-only (reference) models a CPU-offload policy, which pins memory: that needs an accelerator."""

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        config, forward_only = self.engine_config, self.engine_config.forward_only
        config.forward_only = False
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            config.forward_only = forward_only


class CPUTrustRegionFSDPEngine(_OnCPU, TrustRegionFSDPEngine):
    """The same on the CPU platform."""


class CPUValueFSDPEngine(_OnCPU, FSDPEngineWithValueHead):
    """verl's critic on the CPU platform."""


def register_fsdp() -> None:
    """Register the engines.

    On NVIDIA devices verl looks up (device, vendor) before the device alone, where its own engine stands, so ours
    takes precedence without displacing it.
    """
    backends = ["fsdp", "fsdp2"]
    register = EngineRegistry.register
    register(model_type="language_model", backend=backends, device="cuda", vendor="nvidia")(TrustRegionFSDPEngine)
    register(model_type="language_model", backend=backends, device="cpu")(CPUTrustRegionFSDPEngine)
    register(model_type="value_model", backend=backends, device="cpu")(CPUValueFSDPEngine)


completed(__name__)
