# shellcheck shell=bash
# Sourced by the scripts beside it, so that each of them works on a new machine by itself:
# makes .venv from constraints.txt, and costs a few milliseconds when that is done already.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv_python=.venv/bin/python

fail() {
    printf '%s: %s\n' "$0" "$1" >&2
    exit 1
}

# environment EXTRAS [PACKAGE...]: leaves in .venv the project with EXTRAS (comma-separated) and
# the PACKAGEs, which come without their dependencies.
environment() {
    local stamp
    stamp=.venv/installed-$(IFS=+ && echo "$*")
    is_current "$stamp" && return
    {
        if command -v flock >/dev/null && ! flock --nonblock 9; then
            echo "Waiting for another script that is installing into .venv" >&2
            flock 9
        fi
        is_current "$stamp" || make_current "$stamp" "$@" 9<&-
    } 9<pyproject.toml # the lock: a file that every checkout has, and nothing to clean up
}

# Everything that decides what gets installed. The stamp is this text itself: no digest tool needed.
inputs() {
    pwd # the editable install holds this path
    "$venv_python" --version
    cat pyproject.toml constraints.txt
}

is_current() {
    [[ -f $1 && -x $venv_python && $(<"$1") == "$(inputs)" ]]
}

make_current() {
    local stamp=$1 extras=$2
    shift 2
    "$venv_python" -m pip --version >/dev/null 2>&1 || make_venv
    echo "Installing dynamiq-allreduce[$extras] into .venv (minutes at first, then skipped)" >&2
    pip_install --editable ".[$extras]"
    (($# == 0)) || pip_install --no-deps "$@"
    inputs >"$stamp"
}

make_venv() {
    local python
    python=$(find_python) || fail "needs Python 3.11 or later: install python3.11, or set PYTHON"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python lacks venv or ensurepip: on Debian and Ubuntu, install ${python##*/}-venv"
    "$python" -m venv --clear .venv
}

find_python() {
    local python
    for python in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

# Quiet unless it fails. The environment variables, not --constraint, because they also reach the
# build of the project itself: PIP_CONSTRAINT in older pips, PIP_BUILD_CONSTRAINT in newer ones.
pip_install() {
    local output
    output=$(PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
        "$venv_python" -m pip install --disable-pip-version-check "$@" 2>&1 </dev/null) ||
        fail "pip failed:
$output"
}
