#!/usr/bin/env bash
# Builds .venv in the clone; called by `make setup`, which knows when it is up to date.
# Usage: tools/setup.sh environment [PYTHON]   the pinned packages
#        tools/setup.sh package                verl_plugins itself, editable
# The package index is the one of pip's own configuration.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
log=$venv/setup.log

fail() {
    echo "setup: $1" >&2
    exit 1
}

make_venv() {
    local python=$1 version
    command -v "$python" >/dev/null || fail "$python is not there. Name a Python 3.11 or 3.12: make setup PYTHON=python3.11"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    case $version in
    3.11 | 3.12) ;;
    *) fail "$python is Python $version; supported are 3.11 and 3.12. Name one: make setup PYTHON=python3.11" ;;
    esac
    # A folder that was moved or half written is built again.
    if [ "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$version" ] ||
        ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "setup: new virtual environment $venv (Python $version)"
        "$python" -m venv --clear "$venv" ||
            fail "venv failed. On Debian and Ubuntu it is a package of its own: apt-get install python$version-venv"
    fi
}

# pip prints a screen of text for each package: it goes to the log, and a line about how far it is to the screen.
pip_quietly() {
    local total pid started=$SECONDS
    total=$(cat requirements/cpu.lock requirements/dev.lock | grep -c '==')
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check "$@" >"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        if [ $((SECONDS - started)) -ge 20 ]; then
            started=$SECONDS
            if grep -q '^Installing collected' "$log"; then
                echo "setup: unpacking into $venv"
            else
                echo "setup: found or downloaded $(grep -c -E '^(Collecting|Requirement already)' "$log") of about $total packages"
            fi
        fi
        sleep 1
    done
    wait "$pid" || {
        grep -E 'ERROR|error:' "$log" | tail -5 >&2
        fail "pip failed; all it said is in $log. The index is that of pip's configuration ($venv/bin/pip config list)"
    }
}

case ${1:-} in
environment)
    make_venv "${2:-python3}"
    "$venv/bin/python" tools/torch_build.py requirements/cpu.lock
    pip_quietly -r requirements/dev.lock
    "$venv/bin/python" -m pip check
    ;;
package)
    pip_quietly --no-deps --no-build-isolation --editable .
    "$venv/bin/python" -c 'import verl_plugins; print("setup: verl_plugins", verl_plugins.__version__, "in .venv")'
    ;;
*)
    fail "usage: tools/setup.sh environment [PYTHON] | package"
    ;;
esac
