from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import plot_runs

ACCURACY = "val-core/tiny/sum/acc/mean@4"


def row(step: int, **data: float | str) -> str:
    return json.dumps({"step": step, "data": data})


def trained(step: int, accuracy: float | None = None) -> str:
    data: dict[str, float] = {"critic/score/mean": step / 10, "timing_s/step": 2.0, "actor/masked_share": 0.01 * step}
    if accuracy is not None:
        data[ACCURACY] = accuracy
    return row(step, **data)


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run that was resumed after step 2: step 2 is there twice."""
    lines = [row(0, **{ACCURACY: 0.4}), trained(1), trained(2, 0.1), trained(2, 0.5), trained(3, 0.75)]
    return write(tmp_path / "seed_0" / "metrics.jsonl", *lines).parent


def test_png_csv_and_table(run, capsys):
    assert plot_runs.main([str(run), "--wall-s", "321", "--peak-gib", "5.25"]) == 0
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = list(csv.DictReader((run / "curves.csv").open()))
    assert [line["step"] for line in lines] == ["0", "1", "2", "3"]
    assert [line["accuracy"] for line in lines] == ["0.4", "", "0.5", "0.75"]
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["run", "before", "after", "points", "steps", "wall", "s", "peak", "GiB", "masked"]
    assert out[2].split() == ["seed_0", "0.400", "0.750", "+35.0", "3", "321", "5.2", "0.0200"]


def test_the_last_row_of_a_step_counts(run):
    rows = plot_runs.read_run(run).rows
    assert sorted(rows) == [0, 1, 2, 3]
    assert rows[2][ACCURACY] == 0.5


def test_several_runs_get_mean_and_range(run, tmp_path, capsys):
    other = write(tmp_path / "b.jsonl", row(0, **{ACCURACY: 0.5}), trained(1, 0.6))
    png = tmp_path / "out" / "both.png"
    assert plot_runs.main([str(run), str(other), "--out", str(png), "--label", "one", "two"]) == 0
    out = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert out[4][:4] == ["mean", "0.450", "0.675", "+22.5"]
    assert out[5][:4] == ["lowest", "0.400", "0.600", "+10.0"]
    assert out[6][:4] == ["highest", "0.500", "0.750", "+35.0"]
    assert png.is_file() and {line["run"] for line in csv.DictReader(png.with_suffix(".csv").open())} == {"one", "two"}


def test_equal_names_are_told_apart(run, tmp_path, capsys):
    copy = write(tmp_path / "again" / "seed_0" / "metrics.jsonl", trained(1)).parent
    assert plot_runs.main([str(run), str(copy)]) == 0
    out = capsys.readouterr().out
    assert "seed_0 #1" in out and "seed_0 #2" in out


def test_cost_is_read_from_the_run_when_not_given(run):
    from_steps = plot_runs.summarise(plot_runs.read_run(run))
    assert (from_steps.wall_s, from_steps.peak_gib) == (6.0, None)
    (run / "run.json").write_text(json.dumps({"wall_s": 99.0, "peak_memory_bytes": 3 * 2**30}))
    measured = plot_runs.summarise(plot_runs.read_run(run))
    assert (measured.wall_s, measured.peak_gib) == (99.0, 3.0)


def test_accuracy_is_acc_with_most_samples_and_never_best_of_n():
    names = [
        "val-core/a/acc/best@8/mean",
        "val-core/a/acc/mean@4",
        "val-core/a/acc/mean@16",
        "val-core/a/reward/mean@32",
    ]
    found = plot_runs.Run("r", {0: dict.fromkeys(names, 1.0)})
    assert found.accuracy_key() == "val-core/a/acc/mean@16"
    assert plot_runs.Run("r", {0: {"critic/score/mean": 1.0}}).accuracy_key() is None


def test_metrics_that_are_not_numbers_are_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"step": 1, "data": {"a": "text", "b": null, "c": NaN, "d": 2}}')
    found = plot_runs.read_run(path)
    assert found.series("d") == [(1, 2.0)] and not found.series("c") and "a" not in found.keys()


def test_a_last_line_cut_short_is_dropped(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "da')
    assert max(plot_runs.read_run(run).rows) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows"),
        ("step 1 loss 0.3\nstep 2 loss 0.2\n", "line 1: not a row of verl's file logger"),
        ('{"step": 1}\n{"step": 2}\n', "line 1: not a row of verl's file logger"),
        ('{"step": 1, "data": {}}\nnonsense\n{"step": 2, "data": {}}\n', "line 2: not a row"),
    ],
)
def test_a_file_that_is_not_verls_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    assert plot_runs.main([str(path)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "curves.png").exists()


def test_missing_files_and_ambiguous_folders_are_refused(tmp_path, capsys):
    assert plot_runs.main([str(tmp_path / "nowhere")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    assert plot_runs.main([str(tmp_path)]) == 1
    assert "no .jsonl file" in capsys.readouterr().err
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, trained(1))
    assert plot_runs.main([str(tmp_path)]) == 1
    assert "several .jsonl files (a.jsonl, b.jsonl)" in capsys.readouterr().err


def test_one_value_per_run_is_needed(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        plot_runs.main([str(run), "--wall-s", "1", "2"])
    assert stopped.value.code == 2
    assert "--wall-s needs one value a run: 1, got 2" in capsys.readouterr().err
