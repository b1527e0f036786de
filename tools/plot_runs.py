"""Plot verl runs from the JSON lines that its `file` logger writes, and print what they gained.

    python tools/plot_runs.py outputs/tiny_pdm --out outputs/tiny_pdm/curves.png

A run is a `.jsonl` file, or the folder that has it. A resumed run repeats the steps after its last checkpoint: the last
row of a step counts. Writes a PNG with four panels (reward, accuracy on held-out problems, masked
share, divergence), a CSV of the same numbers beside it, and a table on standard output.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ACCURACY_PANEL = "accuracy on held-out problems"
DIVERGENCE_PANEL = "divergence D from the anchor (log scale)"
_STYLES = ("-", "--", ":")

DEFAULT_NAME = "metrics.jsonl"
"""What our trainer calls the file in the folder of a run."""

COST_NAME = "run.json"
"""Where `tools/run_demo.py` writes what a run cost."""

Rows = dict[int, dict[str, float]]

_ACCURACY = re.compile(r"^val-core/(?P<source>.+)/(?P<name>acc|reward|score)/mean@(?P<samples>\d+)$")
_GREEDY = re.compile(r"^val-[\w-]*greedy[\w-]*/.+/mean@\d+$")

REWARD_KEYS = ("critic/score/mean", "critic/rewards/mean")
MASK_KEYS = {
    "all": "actor/masked_share",
    "A > 0": "actor/masked_share_positive",
    "A < 0": "actor/masked_share_negative",
}
DIVERGENCE_KEYS = {
    "mean": "actor/divergence_mean",
    "95 %": "actor/divergence_p95",
    "first update": "actor/divergence_first",
}
STEP_TIME_KEY = "timing_s/step"
# Of the device, else of the whole machine.
MEMORY_KEYS = ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb")


@dataclass(frozen=True)
class Run:
    """One run: label, metrics of each step by verl's names, and the cost where it was measured from outside."""

    label: str
    rows: Rows
    wall_s: float | None = None
    peak_gib: float | None = None

    def series(self, key: str) -> list[tuple[int, float]]:
        """Steps and values of a metric, where it was logged and is finite."""
        return [(step, row[key]) for step, row in sorted(self.rows.items()) if math.isfinite(row.get(key, math.nan))]

    def keys(self) -> set[str]:
        """Every metric that any step logged."""
        return {key for row in self.rows.values() for key in row}

    def first_present(self, keys: Iterable[str]) -> str | None:
        """The first of several names for one quantity that this run logged."""
        present = self.keys()
        return next((key for key in keys if key in present), None)

    def accuracy_key(self) -> str | None:
        """Held-out accuracy: `acc` before `reward`, then the most samples a problem."""
        matches = [match for key in self.keys() if (match := _ACCURACY.match(key))]
        if not matches:
            return None
        best = max(matches, key=lambda m: (m["name"] == "acc", int(m["samples"]), m.string))
        return best.string

    def greedy_key(self) -> str | None:
        """Held-out accuracy of greedy decoding, if a second validation logged it."""
        return min((key for key in self.keys() if _GREEDY.match(key)), default=None)


def read_file(path: Path) -> Rows:
    """Read one file of JSON lines; the last row of a step wins.

    A last line cut short by a killed process is dropped.

    Raises:
        ValueError: a line is not a row of verl's file logger, or there is no row at all.
    """
    rows: Rows = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step, data = int(record["step"]), dict(record["data"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and rows:
                break
            raise ValueError(
                f"{path}, line {number}: not a row of verl's file logger, which writes "
                f'{{"step": 1, "data": {{...}}}}; got {line[:60]!r}. Train with trainer.logger=[console,file].'
            ) from error
        numbers = {k: float(v) for k, v in data.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        rows[step] = {**rows.get(step, {}), **numbers}
    if not rows:
        raise ValueError(f"{path}: no rows. Did the run stop before its first step? Its log says why.")
    return rows


def read_run(path: Path) -> Run:
    """Read a run from its file, or from its folder: `metrics.jsonl` there, or the only `.jsonl` file.

    Raises:
        FileNotFoundError: no such file or folder, or a folder without a `.jsonl` file.
        ValueError: several files could be meant, or the file is not verl's.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder. Give a .jsonl file or the folder of a run.")
    file = path
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise FileNotFoundError(f"{path}: no .jsonl file in this folder. Train with trainer.logger=[console,file].")
        file = path / DEFAULT_NAME if path / DEFAULT_NAME in found else found[0]
        if len(found) > 1 and file.name != DEFAULT_NAME:
            raise ValueError(
                f"{path}: several .jsonl files ({', '.join(f.name for f in found)}). Name the one you mean."
            )
    label = file.resolve().parent.name if file.name == DEFAULT_NAME else file.stem
    return Run(label, read_file(file), *_measured_cost(file.with_name(COST_NAME)))


def _measured_cost(path: Path) -> tuple[float | None, float | None]:
    """Wall seconds and peak GiB, start-up and all processes included, if the demo left them."""
    if not path.is_file():
        return None, None
    facts = json.loads(path.read_text(encoding="utf-8"))
    return facts["wall_s"], facts["peak_memory_bytes"] / 2**30


def _curve_keys(run: Run) -> dict[str, str]:
    """Column name to metric, for everything that is plotted of a run."""
    wanted = {
        "reward": run.first_present(REWARD_KEYS),
        "accuracy": run.accuracy_key(),
        "accuracy_greedy": run.greedy_key(),
        **{
            key.removeprefix("actor/"): run.first_present([key])
            for key in (*MASK_KEYS.values(), *DIVERGENCE_KEYS.values())
        },
        "step_seconds": run.first_present([STEP_TIME_KEY]),
    }
    return {name: key for name, key in wanted.items() if key is not None}


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write the plotted numbers: one line per run and step, empty where nothing was logged."""
    keys = {run.label: _curve_keys(run) for run in runs}
    names = list(dict.fromkeys(name for columns in keys.values() for name in columns))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *names])
        for run in runs:
            for step, row in sorted(run.rows.items()):
                writer.writerow([run.label, step, *(row.get(keys[run.label].get(name, ""), "") for name in names)])


def _panels(run: Run) -> dict[str, dict[str, str | None]]:
    """Title of each panel to its lines: their names and metrics."""
    return {
        "reward (training batch)": {"": run.first_present(REWARD_KEYS)},
        ACCURACY_PANEL: {"sampled": run.accuracy_key(), "greedy": run.greedy_key()},
        "masked share of tokens": dict(MASK_KEYS),
        DIVERGENCE_PANEL: dict(DIVERGENCE_KEYS),
    }


def plot(path: Path, runs: Sequence[Run], title: str = "") -> None:
    """Draw the four panels; several runs differ by colour, lines of one panel by style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    panels = [_panels(run) for run in runs]
    for axis, panel in zip(axes.flat, panels[0], strict=True):
        named: dict[str, Any] = {}
        for number, run in enumerate(runs):
            for position, (name, key) in enumerate(panels[number][panel].items()):
                points = run.series(key) if key else []
                if not points:
                    continue
                style = {"linestyle": _STYLES[position], "color": f"C{number if len(runs) > 1 else position}"}
                marker = "o" if panel == ACCURACY_PANEL else ""
                (line,) = axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, **style)
                named.setdefault(name, line)
        axis.set(title=panel, xlabel="step")
        axis.grid(alpha=0.3)
        if not named:
            axis.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axis.transAxes, color="0.5")
        elif panel == DIVERGENCE_PANEL:
            axis.set_yscale("log")
        if len(named) > 1:
            axis.legend(named.values(), named.keys(), fontsize=8)
    if len(runs) > 1:
        colours = [plt.Line2D([], [], color=f"C{number}", label=run.label) for number, run in enumerate(runs)]
        figure.legend(handles=colours, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@dataclass(frozen=True)
class Summary:
    """What a run gained and cost; None where it was not logged."""

    label: str
    before: float | None
    after: float | None
    steps: int
    wall_s: float | None
    peak_gib: float | None
    masked_share: float | None

    @property
    def gain(self) -> float | None:
        """Accuracy after minus before, in percentage points."""
        return None if self.before is None or self.after is None else 100 * (self.after - self.before)


def summarise(run: Run) -> Summary:
    """Accuracy at the first and the last validation, and the cost.

    Where the cost was not measured from outside it is the sum of verl's step times and the largest memory it logged,
    which leave out start-up and other processes.
    """
    accuracy_key = run.accuracy_key()
    points = run.series(accuracy_key) if accuracy_key else []
    masked = [value for _, value in run.series(MASK_KEYS["all"])]
    times = [value for _, value in run.series(STEP_TIME_KEY)]
    peaks = [max((value for _, value in run.series(key)), default=0.0) for key in MEMORY_KEYS]
    return Summary(
        label=run.label,
        before=points[0][1] if points else None,
        after=points[-1][1] if len(points) > 1 else None,
        steps=max(run.rows),
        wall_s=run.wall_s if run.wall_s is not None else (sum(times) if times else None),
        # Zero is what a device without such a counter reports.
        peak_gib=run.peak_gib if run.peak_gib is not None else next((peak for peak in peaks if peak > 0), None),
        masked_share=sum(masked) / len(masked) if masked else None,
    )


_FORMATS = (".3f", ".3f", "+.1f", ".0f", ".0f", ".1f", ".4f")


def _line(label: str, values: Sequence[float | None]) -> list[str]:
    return [label, *("-" if v is None else format(v, form) for v, form in zip(values, _FORMATS, strict=True))]


def table(summaries: Sequence[Summary]) -> str:
    """The summaries as text; for several runs also their mean, lowest and highest."""
    columns = [[s.before, s.after, s.gain, s.steps, s.wall_s, s.peak_gib, s.masked_share] for s in summaries]
    lines = [["run", "before", "after", "points", "steps", "wall s", "peak GiB", "masked"]]
    lines += [_line(s.label, values) for s, values in zip(summaries, columns, strict=True)]
    if len(summaries) > 1:
        logged = [[value for value in column if value is not None] for column in zip(*columns, strict=True)]
        lines.append(_line("mean", [sum(values) / len(values) if values else None for values in logged]))
        lines.append(_line("lowest", [min(values, default=None) for values in logged]))
        lines.append(_line("highest", [max(values, default=None) for values in logged]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    title = "Accuracy on held-out problems before and after, and the cost"
    return "\n".join([title, *("  ".join(row) for row in rows)])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a .jsonl file or the folder of a run")
    parser.add_argument("--out", type=Path, help="the PNG to write (default: curves.png in the first run's folder)")
    parser.add_argument("--title", default="", help="title above the panels")
    parser.add_argument("--label", nargs="+", help="a name for each run (default: its folder's or file's name)")
    parser.add_argument("--wall-s", nargs="+", type=float, help="wall time of each run in seconds, start-up included")
    parser.add_argument("--peak-gib", nargs="+", type=float, help="peak memory of each run in GiB, all its processes")
    options = parser.parse_args(arguments)
    for name in ("label", "wall_s", "peak_gib"):
        given = getattr(options, name)
        if given is not None and len(given) != len(options.runs):
            parser.error(f"--{name.replace('_', '-')} needs one value a run: {len(options.runs)}, got {len(given)}")
    if options.out is None:
        first: Path = options.runs[0]
        options.out = (first if first.is_dir() else first.parent) / "curves.png"
    return options


def _distinct(labels: Sequence[str]) -> list[str]:
    """Number the labels that occur more than once."""
    return [
        f"{label} #{labels[:i].count(label) + 1}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the runs, write PNG and CSV, print the table; 1 with a message if a run cannot be read."""
    options = _parse(arguments)
    try:
        runs = [read_run(path) for path in options.runs]
    except (OSError, ValueError) as error:
        print(f"plot_runs: {error}", file=sys.stderr)
        return 1
    labels = _distinct(options.label or [run.label for run in runs])
    runs = [replace(run, label=label) for label, run in zip(labels, runs, strict=True)]
    if options.wall_s is not None:
        runs = [replace(run, wall_s=seconds) for run, seconds in zip(runs, options.wall_s, strict=True)]
    if options.peak_gib is not None:
        runs = [replace(run, peak_gib=gib) for run, gib in zip(runs, options.peak_gib, strict=True)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    plot(options.out, runs, options.title)
    write_csv(options.out.with_suffix(".csv"), runs)
    print(table([summarise(run) for run in runs]))
    print(f"Curves: {options.out}, numbers: {options.out.with_suffix('.csv')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
