#!/usr/bin/env bash
# Pretrains a model from a recipe. Default: the embedded recipe with SCAPE, on all GPUs or on 2 CPU processes.
#
#   CONFIG_FILE=train_configs/X.toml NGPU=4 ./run_train.sh --sync.scape.density=0.01
#
# CONFIG_FILE    recipe (TOML), or "a.toml,b.toml"        NGPU           processes on this node
# LOG_RANK       ranks whose output is shown, "0,1"       COMM_MODE      fake_backend: dry run of NGPU ranks, one CPU
# NNODES         nodes, each runs this script, or "2:4"   RDZV_ENDPOINT  host:port of one of them, or of several, "a:1,b:1"
# PYTHON         Python interpreter                       SCAPE_TRACEBACK=1  print tracebacks for invalid input too
# MAX_RESTARTS   consecutive restarts without progress after a lost rank (default 0, with NNODES=2:4 3; requires
#                --checkpoint.enable)
# CUDA_VISIBLE_DEVICES   an empty value trains on the CPU, also on a machine with GPUs
# STOP_SECONDS   time for a final checkpoint after SIGTERM, SIGUSR1 or Ctrl-C (default 1800)
#
# Exit codes: 0 training completed; 2 invalid input; 3 a rank was lost or an error occurred; 4 stopped on request,
# nothing saved; 75 stopped on request with a checkpoint: run the same command again. See docs/reference/exit_codes.md.
set -euo pipefail
export SCAPE_CALLED_FROM="$PWD" # CONFIG_FILE is looked up there first; all other relative paths start at the repository
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh trainer
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m torchtitan_scape.start "$@"
