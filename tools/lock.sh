#!/usr/bin/env bash
# Writes requirements/{cpu,dev}.lock: what pip chooses for {cpu,dev}.in in a fresh environment.
# Usage: tools/lock.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3.11}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A local label (+cpu) names the build of one index, and the CUDA packages come with torch where the platform wants them.
pins() {
    "$work/venv/bin/python" -m pip freeze --all --exclude pip |
        sed -E 's/\+[A-Za-z0-9.]+$//' | grep -v -i -E '^(nvidia-|cuda-|triton==)' | LC_ALL=C sort -f
}

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet -r requirements/cpu.in
pins >"$work/cpu"
"$work/venv/bin/python" -m pip install --quiet -r requirements/dev.in
"$work/venv/bin/python" -m pip check
pins >"$work/dev"
version=$("$work/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
{
    echo "# Written by \`make lock\` with Python $version from cpu.in. Change that file, not this one."
    cat "$work/cpu"
} >requirements/cpu.lock
{
    echo "# Written by \`make lock\` with Python $version from dev.in. Change that file, not this one."
    echo "-r cpu.lock"
    LC_ALL=C comm -13 <(LC_ALL=C sort "$work/cpu") <(LC_ALL=C sort "$work/dev") | LC_ALL=C sort -f
} >requirements/dev.lock
