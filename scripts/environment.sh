# Sets PYTHON to a Python that can import torchtitan. Sourced by run_train.sh and run_tests.sh, from the repository
# root. A Python that already has torchtitan is used unchanged (for example in a container); otherwise this creates
# .venv and installs the project into it.
#
# Usage: source scripts/environment.sh [extra]     extra: an optional dependency group, such as "test"

ensure_environment() {
    local extra="${1:-}" requirement="." probe
    if [ -n "$extra" ]; then requirement=".[$extra]"; fi
    # Only look for the packages: importing torchtitan takes seconds and requires that the device was selected.
    probe="import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in ('torch', 'torchtitan', 'triton')))"
    PYTHON="${PYTHON:-$(command -v python3 || command -v python || true)}"
    if [ -z "$PYTHON" ]; then
        echo "error: no python3 on PATH; install Python 3.11 or 3.12" >&2
        return 1
    fi
    if [ -x .venv/bin/python ] && ! "$PYTHON" -c "$probe" 2>/dev/null; then
        PYTHON="$PWD/.venv/bin/python"
    fi
    if ! "$PYTHON" -c "$probe" 2>/dev/null; then
        echo "$PYTHON cannot import torchtitan: creating .venv and installing into it (a few minutes)"
        "$PYTHON" -m venv .venv || { echo "error: $PYTHON could not create .venv" >&2; return 1; }
        PYTHON="$PWD/.venv/bin/python"
        "$PYTHON" -m pip install --quiet --editable "$requirement" || {
            echo "error: the installation into .venv failed; remove .venv and try again" >&2
            return 1
        }
        export PYTHON
        return
    fi
    local release
    release=$("$PYTHON" -c "import importlib.metadata as m; print(m.version('torchtitan'))" 2>/dev/null || echo 0.2.2)
    if [ "${release#0.2.2}" = "$release" ]; then
        echo "error: $PYTHON has torchtitan $release, but this project needs 0.2.2; install it, or set PYTHON" >&2
        return 1
    fi
    if [ "$extra" = test ] && ! "$PYTHON" -c "import pytest, xdist, hypothesis, ruff, mypy" 2>/dev/null; then
        if [ "$PYTHON" != "$PWD/.venv/bin/python" ]; then
            echo "error: $PYTHON has torchtitan but not the test tools; run: $PYTHON -m pip install -e '.[test]'" >&2
            return 1
        fi
        echo "installing the test tools into .venv"
        "$PYTHON" -m pip install --quiet --editable "$requirement" || return 1
    fi
    export PYTHON
}

ensure_environment "$@"
