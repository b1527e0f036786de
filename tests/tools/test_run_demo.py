from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools import run_demo
from tools.run_demo import Memory, Tail, accuracy, advice, reasons, step_line, train

ROW = {
    "step": 7,
    "data": {
        "critic/score/mean": 0.4453,
        "actor/masked_share": 0.0268,
        "actor/divergence_mean": 0.0545,
        "timing_s/step": 3.32,
    },
}
LOG = """\
\x1b[36m(TaskRunnerV1 pid=12)\x1b[0m some noise
verl_plugins: this run is refused, nothing was started:
  1. actor_rollout_ref.rollout.top_p=0.9 with pdm_topk_kl: reason. Set actor_rollout_ref.rollout.top_p=1.
\x1b[36m(WorkerDict pid=13)\x1b[0m Traceback (most recent call last):
\x1b[36m(WorkerDict pid=13)\x1b[0m ValueError: the same
\x1b[36m(WorkerDict pid=14)\x1b[0m ValueError: the same
ray.exceptions.RayTaskError(ValueError): it ended
"""


def test_a_step_in_one_line() -> None:
    assert step_line(ROW, 60) == "step   7/60  reward 0.45  masked  2.7 %  D 0.0545   3.3 s"


def test_a_validation_alone() -> None:
    row = {"step": 0, "data": {"val-core/tiny_sum/acc/mean@4": 0.41, "val-core/tiny_sum/reward/mean@4": 0.4}}
    assert step_line(row, 60) == "step   0/60  held-out accuracy 41.0 %"


def test_accuracy_comes_before_reward() -> None:
    assert accuracy({"val-core/a/reward/mean@4": 0.1, "val-core/a/acc/mean@4": 0.2}) == 0.2
    assert accuracy({"val-core/a/reward/mean@4": 0.1}) == 0.1
    assert accuracy({"critic/score/mean": 0.1}) is None


def test_reasons_are_found_once_and_without_prefixes() -> None:
    assert reasons(LOG) == [
        "verl_plugins: this run is refused, nothing was started:",
        "  1. actor_rollout_ref.rollout.top_p=0.9 with pdm_topk_kl: reason. Set actor_rollout_ref.rollout.top_p=1.",
        "ValueError: the same",
        "ray.exceptions.RayTaskError(ValueError): it ended",
    ]


def test_advice_fits_the_reason() -> None:
    assert "verl-plugins show" in advice(LOG)[0]
    assert "--out" in advice("OSError: [Errno 28] No space left on device")[0]
    assert "verl-plugins doctor" in advice("Segmentation fault")[0]


def test_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    assert list(tail.lines()) == []
    tail.path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    tail.path.write_bytes(b"one\ntwo\n")
    assert list(tail.lines()) == ["two"]
    assert list(tail.lines()) == []


def test_memory_counts_children_and_ends_survivors() -> None:
    program = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    process = subprocess.Popen([sys.executable, "-c", program + "time.sleep(60)"])
    try:
        memory = Memory(psutil.Process(process.pid))
        deadline = time.monotonic() + 30
        while len(memory.seen) < 2 and time.monotonic() < deadline:
            memory.sample()
            time.sleep(0.05)
        assert len(memory.seen) == 2
        assert memory.peak_bytes > 1_000_000
    finally:
        process.kill()
        process.wait()
    assert len(memory.end_survivors()) == 1
    assert not any(other.is_running() and other.status() != psutil.STATUS_ZOMBIE for other in memory.seen.values())


def fake_trainer(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "trainer.py"
    script.write_text(body)
    return [sys.executable, str(script)]


def test_news_of_a_run_are_printed_and_noise_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.dumps(ROW)
    body = f"""
print("noise")
print("verl_plugins: pdm_topk_kl: in words")
with open({str(tmp_path / "metrics.jsonl")!r}, "w") as file:
    file.write({row!r} + chr(10))
"""
    code, wall_s, peak_bytes = train(fake_trainer(tmp_path, body), tmp_path, 60)
    printed = capsys.readouterr().out
    assert code == 0 and wall_s > 0 and peak_bytes > 0
    assert printed.splitlines() == ["verl_plugins: pdm_topk_kl: in words", step_line(ROW, 60)]
    assert "noise" in (tmp_path / "train.log").read_text()


def test_a_failure_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "print('x' * 50); raise OSError(28, 'No space left on device')"
    code, _, _ = train(fake_trainer(tmp_path, body), tmp_path, 60)
    run_demo.report_failure(tmp_path, code)
    printed = capsys.readouterr().err
    assert code == 1
    assert "The run ended with exit code 1:" in printed
    assert "OSError: [Errno 28] No space left on device" in printed
    assert "Free some disk space" in printed and "train.log" in printed


def test_a_run_folder_is_never_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run_demo.py", "recipes/tiny_pdm.yaml", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        run_demo.main()
    assert stop.value.code == 2
