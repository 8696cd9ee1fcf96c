# Sets PYTHON to a Python that can import torchtitan. Sourced by run_train.sh and run_tests.sh, from the repository
# root. A Python that already has torchtitan is used unchanged (for example in a container); otherwise this creates
# .venv and installs the project into it.
#
# An installed torch is never replaced: .venv uses that of the Python it is made from. Without one, the release that CI
# tests is installed, but not on a machine with ROCm, for which the package index has no build.
#
# Usage: source scripts/environment.sh EXTRA     EXTRA: the dependencies to install, "trainer" or "test"

# Returns whether Python $1 has a supported torch. The bound is that of topology/torch_version.py.
has_torch() {
    "$1" -c "import importlib.metadata as m; assert tuple(map(int, m.version('torch').split('.')[:2])) >= (2, 10)" 2>/dev/null
}

# Returns whether this machine has ROCm. An empty or negative list of visible devices means that no GPU is wanted.
has_rocm() {
    local name
    for name in CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES; do
        if [ -n "${!name+set}" ] && { [ -z "${!name}" ] || [ "${!name}" = -1 ]; }; then return 1; fi
    done
    [ -e /dev/kfd ] || [ -n "${ROCM_PATH:-}" ] || [[ ":${LOADEDMODULES:-}" == *:rocm* ]] ||
        compgen -G "/opt/rocm*" >/dev/null
}

# Makes .venv if PYTHON is another one, and installs the project with the extra $1 into it.
install_environment() {
    local extra="$1" make=true options=()
    if [ "$PYTHON" = "$PWD/.venv/bin/python" ]; then make=false; fi
    if has_torch "$PYTHON"; then
        if ! "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('triton') is None)" 2>/dev/null; then
            extra="triton,$extra" # a CPU build; the others install their own
        fi
        options=(--system-site-packages)
        if "$make" && "$PYTHON" -c "import sys; sys.exit(sys.prefix == sys.base_prefix)"; then
            echo "error: $PYTHON has torch, but not torchtitan or triton; run:" \
                "$PYTHON -m pip install -e '.[$extra]'" >&2
            return 1
        fi
    elif has_rocm; then
        echo "error: $PYTHON has no torch, and the package index has no build for ROCm; install one first, see" \
            "docs/getting_started/install.md; to use the CPU, set CUDA_VISIBLE_DEVICES to an empty value" >&2
        return 1
    else
        extra="torch,$extra"
    fi
    if "$make"; then
        echo "$PYTHON cannot import torchtitan: creating .venv and installing into it (a few minutes)"
        "$PYTHON" -m venv ${options[@]+"${options[@]}"} .venv || {
            echo "error: $PYTHON could not create .venv" >&2
            return 1
        }
        PYTHON="$PWD/.venv/bin/python"
    fi
    "$PYTHON" -m pip install --quiet --editable ".[$extra]" || {
        echo "error: the installation into .venv failed; remove .venv and try again" >&2
        return 1
    }
}

ensure_environment() {
    local extra="$1" probe
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
        install_environment "$extra" || return 1
        export PYTHON
        return
    fi
    local release
    release=$("$PYTHON" -c "import importlib.metadata as m; print(m.version('torchtitan'))" 2>/dev/null || echo 0.2.2)
    if [ "${release#0.2.2}" = "$release" ]; then
        echo "error: $PYTHON has torchtitan $release, but this project needs 0.2.2; install it, or set PYTHON" >&2
        return 1
    fi
    if [ "$extra" = test ] && ! "$PYTHON" -c "import accelerate, hypothesis, lightning_fabric, mypy, pytest, ruff, xdist" 2>/dev/null; then
        if [ "$PYTHON" != "$PWD/.venv/bin/python" ]; then
            echo "error: $PYTHON has torchtitan but not the test tools; run: $PYTHON -m pip install -e '.[test]'" >&2
            return 1
        fi
        echo "installing the test tools into .venv"
        "$PYTHON" -m pip install --quiet --editable ".[$extra]" || return 1
    fi
    export PYTHON
}

ensure_environment "$@"
