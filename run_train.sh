#!/usr/bin/env bash
# Pretrains a model from a recipe. Default: the embedded recipe with SCAPE, on all GPUs or on 2 CPU processes.
#
#   CONFIG_FILE=train_configs/X.toml NGPU=4 ./run_train.sh --sync.scape.density=0.01
#
# CONFIG_FILE    recipe (TOML), or "a.toml,b.toml"        NGPU           processes on this node
# LOG_RANK       ranks whose output is shown, "0,1"       COMM_MODE      fake_backend: dry run of NGPU ranks, one CPU
# NNODES         nodes, each runs this script             RDZV_ENDPOINT  host:port of one of them
# PYTHON         Python interpreter                       SCAPE_TRACEBACK=1  print tracebacks for invalid input too
# MAX_RESTARTS   consecutive restarts without progress after a lost rank (default 0; requires --checkpoint.enable)
# CUDA_VISIBLE_DEVICES   an empty value trains on the CPU, also on a machine with GPUs
# STOP_SECONDS   time for a final checkpoint after SIGTERM, SIGUSR1 or Ctrl-C (default 1800)
#
# Exit codes: 0 training completed; 2 invalid input; 3 a rank was lost or an error occurred; 4 stopped on request,
# nothing saved; 75 stopped on request with a checkpoint: run the same command again. See docs/reference/exit_codes.md.
set -euo pipefail
for name in NGPU NNODES; do
    if [ -n "${!name:-}" ] && [[ ! "${!name}" =~ ^[1-9][0-9]*$ ]]; then
        echo "error: $name=${!name}; it must be a number, 1 or more" >&2
        exit 2
    fi
done
called_from="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh ""  # an explicit argument, since a sourced script otherwise gets those of this one

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
for argument in "$@"; do
    if [ "$argument" = --help ] || [ "$argument" = -h ]; then
        exec "$PYTHON" -m torchtitan_scape.train "$@"
    fi
done

CONFIG_FILE="${CONFIG_FILE:-train_configs/embedded.toml}"
LOG_RANK="${LOG_RANK:-0}"
NNODES="${NNODES:-1}"
COMM_MODE="${COMM_MODE:-}"
IFS=, read -ra recipes <<<"$CONFIG_FILE,"
for i in "${!recipes[@]}"; do
    recipe="${recipes[i]}"
    # A relative path is looked up in the folder of the call first, then in the repository.
    if [[ "$recipe" != /* ]] && [ -f "$called_from/$recipe" ] && [ ! "$called_from" -ef . ]; then
        recipes[i]="$called_from/$recipe"
    elif [ ! -f "$recipe" ]; then
        echo "error: CONFIG_FILE: ${recipe:-an empty name} does not exist; recipes are in train_configs/" >&2
        exit 2
    fi
done
CONFIG_FILE=$(IFS=,; echo "${recipes[*]}")
if [ -z "${NGPU:-}" ]; then
    gpus=$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")
    NGPU=$((gpus > 0 ? gpus : 2))
fi
# Log only errors of C++: the warnings about a lost store have 30 lines each and hide the name of the lost rank.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    threads=$(($(getconf _NPROCESSORS_ONLN) / NGPU))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
arguments=(--job.config_file "$CONFIG_FILE" "$@")

if [ -n "$COMM_MODE" ]; then
    # One process acts as rank 0 of NGPU. --training.steps=N runs N steps; by default the run is only built.
    export NGPU LOCAL_RANK=0
    exec "$PYTHON" -m torchtitan_scape.train --job.config_file "$CONFIG_FILE" \
        --comm.mode="$COMM_MODE" --training.steps=0 "$@"
fi
if [ "$NNODES" -gt 1 ] && [ -z "${RDZV_ENDPOINT:-}" ]; then
    echo "error: NNODES=$NNODES needs RDZV_ENDPOINT=host:port, the same on every node" >&2
    exit 2
fi
exec "$PYTHON" -m torchtitan_scape.runtime.launch --nnodes="$NNODES" --nproc_per_node="$NGPU" \
    --rdzv_backend=fixed --rdzv_endpoint="${RDZV_ENDPOINT:-localhost:0}" \
    --local-ranks-filter="$LOG_RANK" --role=rank --tee=3 -m torchtitan_scape.train "${arguments[@]}"
