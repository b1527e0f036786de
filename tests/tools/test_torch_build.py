from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import torch_build
from tools.torch_build import describe, is_torch_only, pinned, size_of

CPU = {"torch": "file:///wheels/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl"}
CUDA = {
    "torch": "https://files.example/torch-2.13.0-cp311-cp311-manylinux.whl",
    "nvidia-cublas": "https://files.example/cublas.whl",
    "triton": "https://files.example/triton.whl",
}


def test_pinned_version() -> None:
    assert pinned("# torch==1.0\nabc==1\ntorch==2.13.0\ntorchdata==0.11.0\n", "torch") == "2.13.0"
    with pytest.raises(SystemExit, match="pins no torch"):
        pinned("torchdata==0.11.0\n", "torch")


def test_which_packages_come_with_torch_alone() -> None:
    assert [name for name in ("torch", "triton", "nvidia-x", "cuda-y", "numpy") if is_torch_only(name)] == [
        "torch",
        "triton",
        "nvidia-x",
        "cuda-y",
    ]


def test_the_cpu_build_is_named_with_its_size() -> None:
    text = describe("2.13.0", CPU, {"torch": 192_000_000})
    assert (
        text
        == "torch 2.13.0: CPU build (torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl), 192 MB on this machine already"
    )


def test_the_cuda_build_says_how_to_get_the_cpu_one() -> None:
    text = describe("2.13.0", CUDA, {"torch": 800_000_000, "nvidia-cublas": 400_000_000, "triton": None})
    assert "CUDA build" in text and "1 NVIDIA packages" in text and "1200 MB and more to download" in text
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup" in text


def test_size_of_a_local_file(tmp_path: Path) -> None:
    (tmp_path / "a b.whl").write_bytes(b"x" * 10)
    assert size_of((tmp_path / "a b.whl").as_uri()) == 10


def test_a_server_that_does_not_answer_has_no_size() -> None:
    assert size_of("http://127.0.0.1:9/nothing.whl") is None


def test_what_is_installed_is_not_resolved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "cpu.lock"
    lock.write_text("torch==2.13.0\n")
    monkeypatch.setattr(sys, "argv", ["torch_build.py", str(lock)])
    monkeypatch.setattr(torch_build, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(torch_build, "resolve", lambda *_: pytest.fail("pip was asked"))
    torch_build.main()
    assert capsys.readouterr().out == "setup: torch 2.13.0+cpu is installed already\n"
