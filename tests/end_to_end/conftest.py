from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_run import REPOSITORY


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny world, built once; VERL_PLUGINS_TEST_WORLD names one that is there already."""
    given = os.environ.get("VERL_PLUGINS_TEST_WORLD")
    if given:
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("world") / "tiny_world"
    subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "make_tiny.py"), "--out", str(folder)], check=True, cwd=REPOSITORY
    )
    return folder
