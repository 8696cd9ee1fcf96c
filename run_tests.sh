#!/usr/bin/env bash
# Style, types and tests, in three streams. Arguments go to pytest: ./run_tests.sh -k resume
#
#   ./run_tests.sh --slow    what is left out otherwise: tests that take minutes, and further cases of a property
#   ./run_tests.sh -n 0 ...  one stream, for --pdb and -s
#
# The environment rule is run_train.sh's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh test
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

which="not slow"
if [ "${1:-}" = --slow ]; then
    which=slow
    shift
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# Many tests wait for processes: three streams keep two cores busy. A file stays in one: its fixtures are made once.
"$PYTHON" -m pytest -m "$which" -n 3 --dist loadfile --no-loadscope-reorder "$@"
