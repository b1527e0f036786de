"""Say which build of torch pip is about to install, and how large it is, before anything is downloaded.

Usage: python tools/torch_build.py requirements/cpu.lock
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import unquote, urlparse

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_S = 20


def pinned(lock: str, package: str) -> str:
    """Return the version a lock file pins."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock, flags=re.MULTILINE)
    if found is None:
        raise SystemExit(f"torch_build: the lock file pins no {package}")
    return found.group(1)


def is_torch_only(name: str) -> bool:
    """Whether a package is there for torch's GPU build alone."""
    return name == "torch" or name == "triton" or name.startswith(("nvidia-", "cuda-"))


def size_of(url: str) -> int | None:
    """Bytes behind a URL without fetching it; None if the server does not say."""
    parts = urlparse(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).stat().st_size
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            length = answer.headers.get("Content-Length")
    except (urllib.error.URLError, TimeoutError, OSError):
        return None
    return int(length) if length else None


def resolve(python: str, requirement: str, lock: Path) -> dict[str, str]:
    """Ask pip what it would install for torch: {package: URL}. Downloads metadata only where the index offers it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--no-input", "--ignore-installed"]
        command += ["--report", str(report), "--constraint", str(lock), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise SystemExit(
                f"torch_build: pip finds no {requirement}: {' '.join(reason) or done.stderr.strip()}\n"
                "The index is that of pip's own configuration: `pip config list`."
            )
        items = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower(): item["download_info"]["url"] for item in items}


def describe(wanted: str, urls: dict[str, str], sizes: dict[str, int | None]) -> str:
    """Say in words what will be downloaded and, for a GPU build, how to get the CPU one."""
    wheel = unquote(urls["torch"].rsplit("/", 1)[-1])
    gpu_packages = [name for name in urls if name.startswith(("nvidia-", "cuda-"))]
    known = [size for size in sizes.values() if size is not None]
    amount = f"{sum(known) / 1e6:.0f} MB" + (" and more" if len(known) < len(sizes) else "")
    local = all(url.startswith("file:") for url in urls.values())
    where = "on this machine already" if local else "to download"
    if not gpu_packages:
        return f"torch {wanted}: CPU build ({wheel}), {amount} {where}"
    return (
        f"torch {wanted}: CUDA build ({wheel} and {len(gpu_packages)} NVIDIA packages), {amount} {where}.\n"
        "For a CPU the wheel of PyTorch's CPU index is enough (about 200 MB). To take it, stop now and type\n"
        f"    PIP_EXTRA_INDEX_URL={CPU_INDEX} make setup"
    )


def main() -> None:
    lock = Path(sys.argv[1])
    wanted = pinned(lock.read_text(), "torch")
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    if installed.split("+")[0] == wanted:
        print(f"setup: torch {installed} is installed already")
        return
    urls = {name: url for name, url in resolve(sys.executable, f"torch=={wanted}", lock).items() if is_torch_only(name)}
    sizes = {name: size_of(url) for name, url in urls.items()}
    print(f"setup: {describe(wanted, urls, sizes)}", flush=True)


if __name__ == "__main__":
    main()
