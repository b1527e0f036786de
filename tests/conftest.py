"""What the whole suite shares: skips by marker, composed recipes, and a stub of the files a recipe names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Before anything imports torch: two threads on two shared cores are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

if not torch.accelerator.is_available():
    # A torch built for CUDA looks the same to verl here as on the head node of a cluster.
    os.environ.setdefault("VERL_PLATFORM", "cpu")

REPOSITORY = Path(__file__).parent.parent


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup-vllm")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def stub_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that let every recipe find a model folder and data files."""
    import pyarrow
    import pyarrow.parquet

    root = tmp_path_factory.mktemp("stub")
    (root / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 512}')
    table = pyarrow.table({name: ["x"] for name in ("prompt", "data_source", "reward_model")})
    pyarrow.parquet.write_table(table, root / "data.parquet")
    data = str(root / "data.parquet")
    return [f"actor_rollout_ref.model.path={root}", f"data.train_files={data}", f"data.val_files={data}"]


@pytest.fixture(scope="session")
def composed(stub_files: list[str]) -> Callable[..., object]:
    """`composed(name)`: a fresh copy of the shipped recipe, as verl would get it, with the stub files."""
    import verl  # noqa: F401 - loads the plugin as verl does

    from verl_plugins.compose import compose
    from verl_plugins.launch import find_recipe

    @cache
    def once(name: str) -> object:
        return compose(find_recipe(name), stub_files)

    def fresh(name: str = "tiny_pdm") -> object:
        from copy import deepcopy

        return deepcopy(once(name))

    return fresh
