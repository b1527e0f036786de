"""What vLLM's CPU backend needs so that its weights can be replaced while it runs.

That backend lays weights out for its kernels when the model is first loaded. verl's synchronisation then loads new ones
into the same parameters, which must still be there (linear layers) and must be laid out again (experts): the first
failure is loud, the second silently samples from a different model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CPUWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """verl's worker extension, made right for vLLM on a CPU; named by `worker_extension_cls`."""

    def __new__(cls, **kwargs: Any) -> CPUWorkerExtension:
        """Keep linear weights loadable: called before the worker loads its model."""
        keep_linear_weights()
        worker: CPUWorkerExtension = super().__new__(cls, **kwargs)
        return worker

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """Prepare the loaded model as verl does, after a look at its experts."""
        for model in self._iter_all_models():
            check_experts(model)
        super().monkey_patch_model(vocab_size, banned_token_ids)

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receive new weights as verl does, then lay the experts out again.

        Raises:
            RuntimeError: the weights could not be loaded; the message is the first cause.
        """
        try:
            super().update_weights_from_ipc(*args, **kwargs)
        except Exception as error:
            # vLLM reports the message of the last error only: with shared memory, that of verl's failing clean-up.
            raise RuntimeError(first_cause(error)) from error
        for model in self._iter_all_models():
            pack_experts(model)


def first_cause(error: BaseException) -> str:
    """Return kind and message of the error that the others were raised in handling of."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {error}"


def keep_linear_weights() -> None:
    """Make linear layers of this process multiply with plain weights instead of packed copies.

    vLLM offers the switch for layers whose weights it reads again. Packing drops the parameter, so there would be
    nothing to load new weights into.
    """
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase.skip_weight_relayout = True


def pack_experts(model: torch.nn.Module) -> None:
    """Lay out the expert weights that were just loaded; vLLM itself does so for the first load only."""
    for layer, kernel in _expert_layers(model):
        kernel.process_weights_after_loading(layer)


def check_experts(model: torch.nn.Module) -> None:
    """Refuse experts that vLLM pads: new weights would not fit the padded parameters.

    Raises:
        ValueError: the intermediate size of an expert is not a multiple of the kernel's alignment.
    """
    for _, kernel in _expert_layers(model):
        size = kernel.moe_config.intermediate_size_per_partition
        padded = kernel._padded_intermediate_size(kernel.moe_config)
        if padded != size:
            raise ValueError(
                f"moe_intermediate_size={size}: vLLM pads experts to {padded} on a CPU, and new weights of the trainer "
                f"would not fit. Use a model whose moe_intermediate_size is a multiple of {kernel.output_alignment}"
            )


def _expert_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            yield layer, experts
