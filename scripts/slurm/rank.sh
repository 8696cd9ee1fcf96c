#!/bin/bash
# Runs in every task of a Slurm step: translates Slurm's variables to torch's, and starts the trainer with the
# arguments. launch.sh starts it with srun, after setting the variables that all ranks share.
#
# The number of ranks per node is not set here: topology/layout.py reads SLURM_STEP_TASKS_PER_NODE.
set -euo pipefail

# With a time limit shorter than that of --signal=USR1@300 the signal arrives at once. It must not end the task: the
# trainer stops at its first step and writes a checkpoint.
SCAPE_STOP_REQUESTED=""
trap 'SCAPE_STOP_REQUESTED=SIGUSR1' USR1

refuse() {
    echo "[rank ${RANK:-0}] error: $*" >&2
    exit 2
}

# A batch script has a SLURM_PROCID too, but is not a rank; only steps of srun have SLURM_STEP_TASKS_PER_NODE.
if [ -z "${SLURM_PROCID:-}" ] || [ -z "${SLURM_STEP_TASKS_PER_NODE:-}" ]; then
    refuse "rank.sh must be started by srun; submit vista.sbatch or frontier.sbatch with sbatch"
fi
for name in PYTHON MASTER_ADDR MASTER_PORT LOG_DIR; do
    if [ -z "${!name:-}" ]; then refuse "$name is not set; start the job with launch.sh, which sets it"; fi
done

# The world size is the number of tasks of the step. SLURM_NTASKS may be that of the job (srun --preserve-env).
export RANK="$SLURM_PROCID" WORLD_SIZE="${SLURM_STEP_NUM_TASKS:-$SLURM_NTASKS}" LOCAL_RANK="$SLURM_LOCALID"
# torchrun may have set it in the submitting shell, and it would take precedence over Slurm's variables.
unset LOCAL_WORLD_SIZE
# torch uses LOCAL_RANK as the device index. With one GPU per task, every task sees its own GPU as number 0.
for visible in "${ROCR_VISIBLE_DEVICES:-}" "${HIP_VISIBLE_DEVICES:-}" "${CUDA_VISIBLE_DEVICES:-}"; do
    if [ -n "$visible" ] && [[ "$visible" != *,* ]]; then LOCAL_RANK=0; fi
done

# Only rank 0 records the progress for launch.sh.
if [ "$RANK" -ne 0 ]; then unset SCAPE_PROGRESS_FILE; fi
# Log only errors of C++: the warnings about a lost store have 30 lines each and hide the name of the lost rank.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

# The log of hundreds of ranks is unreadable; launch.sh prints the first error of the ranks that are not shown.
if [[ ",${LOG_RANK:-0}," != *",$RANK,"* ]]; then
    exec >"$LOG_DIR/rank-$RANK.log" 2>&1
fi

# The layout assumes that ranks fill one node after the other. Otherwise the bytes per level would be wrong, and the
# shard axis would cross nodes.
if [[ ! "$SLURM_STEP_TASKS_PER_NODE" =~ ^([1-9][0-9]*)(\(x[0-9]+\))?$ ]]; then
    refuse "nodes have different numbers of tasks ($SLURM_STEP_TASKS_PER_NODE); use the same for all: --ntasks-per-node"
fi
if [ "$((RANK / BASH_REMATCH[1]))" -ne "$SLURM_NODEID" ]; then
    refuse "rank $RANK is on node $SLURM_NODEID with SLURM_DISTRIBUTION=${SLURM_DISTRIBUTION:-}, but ranks must fill" \
        "one node after the other, ${BASH_REMATCH[1]} on each; start them with srun --distribution=block"
fi

read -ra command <<<"${TRAIN_SCRIPT:--m torchtitan_scape.train}"
if [ -n "${CONFIG_FILE:-}" ]; then command+=(--job.config_file "$CONFIG_FILE"); fi
# Python installs its handlers later; until then signals are blocked, if this version of env can do so.
block=()
if env --block-signal=USR1 true 2>/dev/null; then block=(env --block-signal=USR1); fi
trap '' USR1
export SCAPE_STOP_REQUESTED
exec ${block[@]+"${block[@]}"} "$PYTHON" "${command[@]}" "$@"
