"""`python -m verl.trainer.main_ppo --config RECIPE [overrides]`: one flag in front of Hydra's own.

verl imports its plugins while Python is still locating `verl.trainer.main_ppo`, before Hydra reads `sys.argv`. The
flag is turned into Hydra's `--config-dir` and `--config-name` there; every other argument is left as it is, and no
other program's arguments are looked at.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TRAINER_MODULE = "verl.trainer.main_ppo"
_OWN_FLAGS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")


class RecipeError(ValueError):
    """The recipe named on the command line cannot be used; the message says what to type instead."""


def recipes_dir() -> Path:
    """Return the folder of the shipped recipes: inside an installed package, beside it in a clone."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names that `--config NAME` finds, sorted. Names that start with `_` are parts, not recipes."""
    root = recipes_dir()
    found = (path.relative_to(root).with_suffix("") for path in root.rglob("*.yaml"))
    return sorted(str(name) for name in found if not any(part.startswith("_") for part in name.parts))


def is_trainer_program(argv: Sequence[str]) -> bool:
    """Whether this interpreter was started to run verl's trainer; `argv` is `sys.orig_argv`."""
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        if flag == "-m":
            return value == TRAINER_MODULE
        if flag == f"-m{TRAINER_MODULE}" or flag.endswith("verl/trainer/main_ppo.py"):
            return True
    return False


def find_recipe(name: str) -> Path:
    """Resolve what the user typed after `--config`. A path wins over the name of a shipped recipe.

    Raises:
        RecipeError: nothing of that name, not YAML, no `defaults:`, or the name of a config of verl's.
    """
    typed = Path(name).expanduser()
    candidates = [typed, typed.with_name(typed.name + ".yaml")] if typed.name else []
    path = next((path for path in candidates if path.is_file()), None)
    if path is None and not typed.is_absolute():
        shipped = recipes_dir() / (name if name.endswith(".yaml") else f"{name}.yaml")
        path = shipped if shipped.is_file() else None
    if path is None:
        close = difflib.get_close_matches(typed.stem, recipe_names(), n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(close)}?" if close else f" Shipped: {', '.join(recipe_names())}."
        what = "is a folder" if typed.is_dir() else f"is not there (looked in {Path.cwd()} and in {recipes_dir()})"
        raise RecipeError(f"--config {name}: {what}.{hint}")
    _check_content(path.resolve())
    return path.resolve()


def _check_content(path: Path) -> None:
    import yaml

    if path.suffix != ".yaml":
        raise RecipeError(
            f"--config {path}: Hydra reads .yaml files only, got suffix {path.suffix!r}. Rename the file."
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"--config {path}: not YAML: {error}") from error
    if not isinstance(content, dict) or "defaults" not in content:
        raise RecipeError(
            f"--config {path}: a recipe is a mapping that starts with `defaults: [ppo_trainer, _self_]` "
            "(or with a recipe of ours in place of ppo_trainer), so that verl's own configuration is underneath."
        )
    if path.stem in _verl_config_names():
        raise RecipeError(
            f"--config {path}: verl has a configuration named {path.stem!r}, which Hydra would load instead. "
            "Rename the recipe."
        )
    _refuse_cycle(path, content)


def _refuse_cycle(path: Path, content: Mapping[str, Any]) -> None:
    """A recipe hides the shipped one of its name, so it must not start from it: Hydra would recurse without end."""
    import yaml

    waiting, seen = _named_in_defaults(content), set[str]()
    while waiting:
        name = waiting.pop()
        if name == path.stem:
            raise RecipeError(
                f"--config {path}: it starts from a recipe named {path.stem!r}, which is its own name. Rename the file."
            )
        shipped = recipes_dir() / f"{name}.yaml"
        if name not in seen and shipped.is_file():
            seen.add(name)
            waiting += _named_in_defaults(yaml.safe_load(shipped.read_text(encoding="utf-8")))


def _named_in_defaults(content: Mapping[str, Any]) -> list[str]:
    return [item for item in content.get("defaults") or [] if isinstance(item, str)]


def _verl_config_names() -> set[str]:
    # Imported by name only: verl may still be half imported when this runs.
    verl = sys.modules.get("verl")
    if verl is None or not getattr(verl, "__path__", None):
        return set()
    return {path.stem for path in (Path(next(iter(verl.__path__))) / "trainer" / "config").glob("*.yaml")}


def translate(argv: list[str]) -> Path | None:
    """Replace `--config RECIPE` in `argv`, in place, by Hydra's flags; return the recipe's path if there was one.

    Raises:
        RecipeError: the flag has no value, is given twice, or stands beside Hydra's own flag for the same thing.
    """
    places = [i for i, word in enumerate(argv) if word == "--config" or word.startswith("--config=")]
    if not places:
        return None
    if len(places) > 1:
        raise RecipeError("--config is given twice. One run takes one recipe; put what differs into overrides.")
    rivals = [word for word in argv if word.split("=", 1)[0] in _OWN_FLAGS]
    if rivals:
        raise RecipeError(f"--config and {rivals[0]} both name the configuration. Use one of them.")
    at = places[0]
    if argv[at] == "--config":
        if at + 1 >= len(argv) or argv[at + 1].startswith("-") or "=" in argv[at + 1] or not argv[at + 1]:
            raise RecipeError("--config needs a recipe: --config recipes/tiny_pdm.yaml, or --config tiny_pdm.")
        name, width = argv[at + 1], 2
    else:
        name, width = argv[at].split("=", 1)[1], 1
    path = find_recipe(name)
    _refuse_misspelt_keys(argv)
    argv[at : at + width] = ["--config-dir", str(path.parent), "--config-name", path.stem]
    return path


def _refuse_misspelt_keys(argv: Sequence[str]) -> None:
    """Name the key that was meant: Hydra would only say that a key of that spelling does not exist."""
    from verl_plugins.losses.trust_region import KEYS

    section = "actor_rollout_ref.actor.policy_loss."
    for word in argv:
        typed = word.lstrip("+~").split("=", 1)[0]
        key = typed.removeprefix(section)
        if typed == key or key in KEYS:
            continue
        close = difflib.get_close_matches(key, list(KEYS), n=1, cutoff=0.75)
        if close:
            raise RecipeError(f"{typed} is not a key. Did you mean {section}{close[0]}? Ours are {', '.join(KEYS)}.")


def search_folders(recipe: Path) -> list[Path]:
    """Return where the `defaults:` of a recipe are looked up after verl's own folder, in order."""
    return [recipe.parent, *([recipes_dir()] if recipe.parent != recipes_dir() else [])]


def wants_cpu(recipe: Path, argv: Sequence[str]) -> bool:
    """Whether a run is for the CPU: `trainer.device` on the command line, in the recipe, or in what it starts from.

    Read before Hydra composes anything, since verl chooses its platform while it is being imported.
    """
    typed = [word.split("=", 1)[1] for word in argv if word.startswith("trainer.device=")]
    return (typed[-1] if typed else _device_of(recipe, search_folders(recipe))) == "cpu"


def _device_of(path: Path, folders: Sequence[Path]) -> str | None:
    import yaml

    if not path.is_file():
        return None
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    device = (content.get("trainer") or {}).get("device")
    if device is not None:
        return str(device)
    # Of two parts that say it, the later wins.
    parts = [folder / f"{name}.yaml" for name in reversed(_named_in_defaults(content)) for folder in folders]
    return next((found for part in parts if (found := _device_of(part, folders)) is not None), None)


def add_recipes_to_hydra(recipe: Path) -> None:
    """Let a recipe outside our folder name ours in its `defaults:` (Hydra allows `searchpath` in few places).

    Hydra puts `--config-dir` behind what plugins add. The folder of the recipe therefore goes in front of ours here:
    a user's own `tiny_pdm.yaml` must never give way to the shipped one.
    """
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class ShippedRecipes(SearchPathPlugin):
        """Appends the folder of the recipe and then that of the shipped ones: nothing of the user's is shadowed."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            """Append the folders."""
            for folder in search_folders(recipe):
                search_path.append(provider="verl_plugins", path=f"file://{folder}")

    Plugins.instance().register(ShippedRecipes)
