#!/usr/bin/env bash
# Runs the test suite with each supported release of torch, in a virtual environment of its own, and stores the table
# results/torch_versions/table.md. A release needs about 20 minutes on two cores and 8 GB of disk, and a network.
#
#   scripts/test_versions.sh                    all releases
#   scripts/test_versions.sh 2.10.0 2.14.1      only these; the others keep their lines
#   TESTS="tests/kernels" scripts/test_versions.sh 2.14.1    only these tests; the table names them
#
# PYTHON    Python 3.11 or 3.12 to make the environments from    FOLDER   where, by default outputs/torch_versions
# WORKERS   processes that run tests, by default 2               KEEP=1   keeps environments, which are then used again
#
# CI runs the suite with the release of the extra `torch` in pyproject.toml. On an index with CPU builds pip prefers them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
releases=("$@")
if [ "${#releases[@]}" -eq 0 ]; then releases=(2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0); fi
PYTHON="${PYTHON:-$(command -v python3)}"
FOLDER="${FOLDER:-$PWD/outputs/torch_versions}"
read -ra tests <<<"${TESTS:-}"
export PYTHONPATH="$PWD" TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
mkdir -p "$FOLDER"

# Makes the environment $2 with torch $1.
install() {
    "$PYTHON" -m venv "$2"
    # Not --quiet, which would hide the constraint that excludes a release.
    "$2/bin/python" -m pip install --progress-bar off "torch==$1" || return 1
    "$2/bin/python" -m pip install --quiet --editable ".[test]" || return 1
    if ! "$2/bin/python" -c "import triton" 2>/dev/null; then # a CPU build
        "$2/bin/python" -m pip install --quiet --editable ".[triton,test]" || return 1
    fi
    # The interpreter of Triton 3.6 needs an older NumPy; without it the tests of the kernels would be skipped.
    if "$2/bin/python" -c "import sys, triton; sys.exit(not triton.__version__.startswith('3.6.'))"; then
        "$2/bin/python" -m pip install --quiet "numpy<2.4" || return 1
    fi
}

failed=0
for release in "${releases[@]}"; do
    environment="$FOLDER/$release" log="$FOLDER/$release.log" junit="$FOLDER/$release.xml"
    rm -f "$junit"
    echo "torch $release: log in $log"
    if ! "$environment/bin/python" -c "import torch, triton, pytest" 2>/dev/null &&
        ! install "$release" "$environment" >"$log" 2>&1; then
        failed=1
        reason=$(grep -m 1 -o "The user requested (constraint).*" "$log" || grep -m 1 "^ERROR" "$log" || echo "see the log")
        "$PYTHON" -m scripts.version_table "$release" --not-installed "${reason:0:200}"
    else
        "$environment/bin/python" -m pytest -q -m "not slow" -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder \
            --junitxml="$junit" "${tests[@]}" >"$log" 2>&1 || failed=1
        "$environment/bin/python" -m scripts.version_table "$release" --junit "$junit" --tests "${TESTS:-all but slow}"
    fi
    if [ "${KEEP:-0}" != 1 ]; then rm -rf "$environment"; fi
done
cat results/torch_versions/table.md
exit "$failed"
