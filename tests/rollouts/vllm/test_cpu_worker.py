"""The worker extension for vLLM's CPU backend, on stand-ins; with real engines in test_vllm_server."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("VLLM_TARGET_DEVICE",):
        monkeypatch.setenv(name, "cpu")
    from verl_plugins.platforms import vllm_cpu

    return vllm_cpu


def model_with_experts(intermediate: int, laid_out: list[torch.nn.Module]) -> torch.nn.Module:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    class Experts(CPUUnquantizedExperts):
        def __init__(self) -> None:
            self.moe_config = SimpleNamespace(
                intermediate_size_per_partition=intermediate, activation=MoEActivation.SILU
            )

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            laid_out.append(layer)

    layer = torch.nn.Linear(2, 2)
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=Experts()))
    other = torch.nn.Linear(2, 2)
    other.quant_method = SimpleNamespace(moe_kernel=None)
    return torch.nn.ModuleList([torch.nn.Linear(2, 2), layer, other])


def test_only_experts_are_laid_out_again(extension: Any) -> None:
    laid_out: list[torch.nn.Module] = []
    model = model_with_experts(64, laid_out)
    extension.check_experts(model)
    extension.pack_experts(model)
    assert laid_out == [model[1]]


def test_experts_that_vllm_pads_are_refused(extension: Any) -> None:
    with pytest.raises(ValueError, match=r"moe_intermediate_size=48: vLLM pads experts to 64 .* multiple of 32"):
        extension.check_experts(model_with_experts(48, []))


def test_linear_layers_keep_their_weight(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not the CPU build")
    monkeypatch.setattr(LinearBase, "skip_weight_relayout", False, raising=False)
    extension.keep_linear_weights()

    class Layer(torch.nn.Linear):
        skip_weight_relayout = LinearBase.skip_weight_relayout

    layer = Layer(32, 32)
    UnquantizedLinearMethod.process_weights_after_loading(object.__new__(UnquantizedLinearMethod), layer)
    assert layer.weight.shape == (32, 32)
    x = torch.ones(3, 32)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))


def test_the_first_cause_of_nested_errors(extension: Any) -> None:
    def failing_clean_up() -> None:
        try:
            raise KeyError("the cause")
        finally:
            raise BufferError("cannot close exported pointers exist")

    with pytest.raises(BufferError) as caught:
        failing_clean_up()
    assert extension.first_cause(caught.value) == "KeyError: 'the cause'"
    assert extension.first_cause(ValueError("alone")) == "ValueError: alone"
