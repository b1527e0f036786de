from __future__ import annotations

import json
from types import SimpleNamespace

from verl_plugins.trainers.metric_log import MetricLog, rows_until


def write(path, *rows):
    path.write_text("".join(json.dumps({"step": s, "data": {"x": x}}) + "\n" for s, x in rows))


def read(path):
    return [(row["step"], row["data"]["x"]) for row in map(json.loads, path.read_text().splitlines())]


def opened(path):
    """verl's file logger: truncates when it opens."""
    return SimpleNamespace(logger={"file": SimpleNamespace(fp=open(path, "wb", buffering=0))})


def test_repeated_steps_keep_their_last_row_and_later_ones_go(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, (0, 0), (1, 1), (2, 2), (2, 22), (3, 3))
    path.write_text(path.read_text() + '{"step": 4, "da')
    assert [json.loads(row)["data"]["x"] for row in rows_until(path, 2)] == [0, 1, 22]
    assert rows_until(tmp_path / "absent.jsonl", 5) == []


def test_resume_keeps_one_row_per_step(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, (0, 0), (1, 1), (2, 2), (3, 3))
    log = MetricLog(path)
    log.set_aside(2)
    tracking = opened(path)
    tracking.logger["file"].fp.write(b'{"step": 2, "data": {"x": "validated again"}}\n')
    log.restore(tracking)
    tracking.logger["file"].fp.write(b'{"step": 3, "data": {"x": 33}}\n')
    assert read(path) == [(0, 0), (1, 1), (2, 2), (3, 33)]
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_between_truncation_and_restore_loses_nothing(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, (0, 0), (1, 1), (2, 2))
    MetricLog(path).set_aside(2)
    opened(path)  # killed here
    again = MetricLog(path)
    again.set_aside(2)
    tracking = opened(path)
    again.restore(tracking)
    assert read(path) == [(0, 0), (1, 1), (2, 2)]


def test_a_fresh_run_starts_empty(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, (0, 0), (1, 1))
    log = MetricLog(path)
    log.set_aside(-1)
    tracking = opened(path)
    log.restore(tracking)
    assert read(path) == []
