#!/bin/bash
# What every task of a step runs: Slurm's names become torch's, and the trainer starts. Arguments go to the trainer.
# srun starts it, from launch.sh, which has set what all ranks share.
#
# How many ranks share a node is not said here: topology/layout.py reads SLURM_STEP_TASKS_PER_NODE itself.
set -euo pipefail

refuse() {
    echo "[rank ${RANK:-0}] error: $*" >&2
    exit 2
}

# A batch script has a SLURM_PROCID too, and is no rank: only steps that srun starts have their tasks counted.
if [ -z "${SLURM_PROCID:-}" ] || [ -z "${SLURM_STEP_TASKS_PER_NODE:-}" ]; then
    refuse "rank.sh must be started by srun; submit vista.sbatch or frontier.sbatch with sbatch"
fi
for name in PYTHON MASTER_ADDR MASTER_PORT LOG_DIR; do
    if [ -z "${!name:-}" ]; then refuse "$name is not set; launch.sh sets it, start the job with that"; fi
done

# SLURM_NTASKS may be the allocation's (srun --preserve-env); the step's count is the world.
export RANK="$SLURM_PROCID" WORLD_SIZE="${SLURM_STEP_NUM_TASKS:-$SLURM_NTASKS}" LOCAL_RANK="$SLURM_LOCALID"
# Left behind by torchrun in the shell that submitted, it would be believed before Slurm.
unset LOCAL_WORLD_SIZE
# LOCAL_RANK is the index of the device for torch. With one GPU a task, every task sees its own as number 0.
for visible in "${ROCR_VISIBLE_DEVICES:-}" "${HIP_VISIBLE_DEVICES:-}" "${CUDA_VISIBLE_DEVICES:-}"; do
    if [ -n "$visible" ] && [[ "$visible" != *,* ]]; then LOCAL_RANK=0; fi
done

# One rank notes how far the job comes, for launch.sh.
if [ "$RANK" -ne 0 ]; then unset SCAPE_PROGRESS_FILE; fi
# Of C++ only errors: warnings of a store that is gone have 30 lines and hide who was lost.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

# 512 ranks that log every step cannot be read; launch.sh shows the first error among those left out.
if [[ ",${LOG_RANK:-0}," != *",$RANK,"* ]]; then
    exec >"$LOG_DIR/rank-$RANK.log" 2>&1
fi

# The layout takes ranks 0, 1, ... to fill the first node, then the next: bytes by level would be wrong otherwise,
# and the shard axis would cross nodes.
if [[ ! "$SLURM_STEP_TASKS_PER_NODE" =~ ^([1-9][0-9]*)(\(x[0-9]+\))?$ ]]; then
    refuse "nodes have different numbers of tasks ($SLURM_STEP_TASKS_PER_NODE); give all the same: --ntasks-per-node"
fi
if [ "$((RANK / BASH_REMATCH[1]))" -ne "$SLURM_NODEID" ]; then
    refuse "rank $RANK is on node $SLURM_NODEID with SLURM_DISTRIBUTION=${SLURM_DISTRIBUTION:-}, but ranks must fill" \
        "node after node, ${BASH_REMATCH[1]} on each; start them with srun --distribution=block"
fi

read -ra command <<<"${TRAIN_SCRIPT:--m torchtitan_scape.train}"
if [ -n "${CONFIG_FILE:-}" ]; then command+=(--job.config_file "$CONFIG_FILE"); fi
exec "$PYTHON" "${command[@]}" "$@"
