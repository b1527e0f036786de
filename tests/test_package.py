from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import hatchling.build
import pytest

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
PACKAGES = ("verl_plugins", "reward")
# Who may know verl: the plugin, its configuration and the adapters. The ideas may not.
ADAPTERS = (
    "verl_plugins/plugin.py",
    "verl_plugins/config.py",
    "verl_plugins/checks.py",
    "verl_plugins/losses/",
    "verl_plugins/platforms/",
    "verl_plugins/rollouts/",
    "verl_plugins/topk/",
    "verl_plugins/trainers/",
)


def sources(repository: Path, *folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((repository / folder).rglob("*.py"))]
    assert found
    return found


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.fixture(scope="session")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        return zipfile.ZipFile(folder / hatchling.build.build_wheel(str(folder)))


def test_the_wheel_ships_the_recipes(wheel: zipfile.ZipFile, repository: Path) -> None:
    names = set(wheel.namelist())
    for path in (repository / "recipes").rglob("*.yaml"):
        assert f"verl_plugins/recipes/{path.relative_to(repository / 'recipes')}" in names


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile, repository: Path) -> None:
    names = set(wheel.namelist())
    for path in sources(repository, *PACKAGES):
        assert str(path.relative_to(repository)) in names
    assert "verl_plugins/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_announces_itself_to_verl(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[verl.plugins]\nverl_plugins = verl_plugins.plugin" in text
    assert "verl-plugins = verl_plugins.cli:main" in text
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_an_installed_recipe_is_found_inside_the_package(
    wheel: zipfile.ZipFile, tmp_path: Path, repository: Path
) -> None:
    wheel.extractall(tmp_path / "site")
    program = "from verl_plugins import launch; print(launch.find_recipe('tiny_pdm')); print(launch.recipe_names())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path / 'site'}:{Path(sys.modules['yaml'].__file__ or '').parent.parent}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(f"{tmp_path}/site/verl_plugins/recipes/tiny_pdm.yaml")
    assert "'tiny_dppo'" in done.stdout and "_base" not in done.stdout


def test_files_are_short(repository: Path) -> None:
    long = {
        str(path.relative_to(repository)): count
        for path in sources(repository, *PACKAGES, "tools", "tests")
        if (count := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert long == {}


def test_functions_are_short(repository: Path) -> None:
    long = {
        f"{path.relative_to(repository)}:{node.name}": length
        for path in sources(repository, *PACKAGES, "tools")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_only_the_adapters_import_verl(repository: Path) -> None:
    outside = [
        str(path.relative_to(repository))
        for path in sources(repository, *PACKAGES)
        if not str(path.relative_to(repository)).startswith(ADAPTERS)
        and any(name.split(".")[0] == "verl" for name in imported(ast.parse(path.read_text())))
    ]
    assert outside == []


def test_reward_needs_neither_us_nor_torch(repository: Path) -> None:
    for path in sources(repository, "reward"):
        roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
        assert not roots & {"torch", "verl", "ray", "verl_plugins", "numpy", "transformers"}, path


def test_import_contracts(repository: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_no_module_has_a_name_that_says_nothing(repository: Path) -> None:
    names = {path.stem for path in sources(repository, *PACKAGES, "tools", "tests")}
    assert not names & {"utils", "util", "helpers", "common", "manager", "base", "misc"}


def test_extras_and_locks_agree(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    lock = dict(
        line.lower().split("==")
        for name in ("cpu.lock", "dev.lock")
        for line in (repository / "requirements" / name).read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    from packaging.requirements import Requirement

    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for name in ("verl", "cpu", "plot", "dev") for text in extras[name]]
    wanted += [Requirement(text) for text in project["dependencies"]]
    for requirement in wanted:
        if requirement.name == project["name"]:
            continue
        name = requirement.name.lower()
        pinned = lock.get(name, lock.get(name.replace("-", "_")))
        assert pinned is not None, f"{requirement.name} is in no lock file"
        assert requirement.specifier.contains(pinned), f"{requirement} does not allow the pinned {pinned}"


def test_lock_files_name_no_place_of_one_machine(repository: Path) -> None:
    for path in (repository / "requirements").glob("*.lock"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith(("#", "-r "))]
        assert lines and all(line.count("==") == 1 and "/" not in line and "+" not in line for line in lines)
