#!/bin/bash
# Runs in every rank: translates the launcher's variables to torch's, and starts the trainer with the arguments.
# launch.sh starts it with srun, ibrun or mpirun, after setting the variables that all ranks share. In an elastic job (see
# launch.sh) it runs once per node, with the number of the node as RANK, and starts the launcher of the node.
set -euo pipefail

# With a time limit shorter than that of --signal=B:USR1@300 the signal arrives at once. It must not end the task: the
# trainer stops at its first step and writes a checkpoint.
SCAPE_STOP_REQUESTED="${SCAPE_STOP_REQUESTED:-}" # launch.sh may have received the signal
trap 'SCAPE_STOP_REQUESTED=SIGUSR1' USR1

refuse() {
    echo "[rank ${RANK:-0}] error: $*" >&2
    if [ -n "${SCAPE_FAILURE_FILE:-}" ]; then echo "2 rank ${RANK:-0}" >>"$SCAPE_FAILURE_FILE" || true; fi
    exit 2
}

# Sets RANK, WORLD_SIZE, LOCAL_RANK, per_node and node from Slurm's variables. topology/layout.py reads the number of
# ranks per node from SLURM_STEP_TASKS_PER_NODE.
from_slurm() {
    # A batch script has a SLURM_PROCID too, but is not a rank; only steps of srun have SLURM_STEP_TASKS_PER_NODE.
    if [ -z "${SLURM_PROCID:-}" ] || [ -z "${SLURM_STEP_TASKS_PER_NODE:-}" ]; then
        refuse "rank.sh must be started by srun; submit an .sbatch file of scripts/slurm with sbatch"
    fi
    # The world size is the number of tasks of the step. SLURM_NTASKS may be that of the job (srun --preserve-env).
    export RANK="$SLURM_PROCID" WORLD_SIZE="${SLURM_STEP_NUM_TASKS:-$SLURM_NTASKS}" LOCAL_RANK="$SLURM_LOCALID"
    # torchrun may have set it in the submitting shell, and it would take precedence over Slurm's variables.
    unset LOCAL_WORLD_SIZE
    if [[ ! "$SLURM_STEP_TASKS_PER_NODE" =~ ^([1-9][0-9]*)(\(x[0-9]+\))?$ ]]; then
        refuse "nodes have different numbers of tasks ($SLURM_STEP_TASKS_PER_NODE);" \
            "use the same for all: --ntasks-per-node"
    fi
    per_node="${BASH_REMATCH[1]}" node="$SLURM_NODEID"
}

# The same from the variables of Open MPI, PMIx, or the PMI of MPICH and Intel MPI. PMIx has no variables for the
# numbers of ranks; launch.sh knows them. Slurm's variables are those of the launcher's daemons.
from_mpi() {
    local name this position=0
    RANK="${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-}}}"
    if [[ ! "$RANK" =~ ^[0-9]+$ ]]; then
        unset RANK
        refuse "LAUNCHER=$LAUNCHER set none of OMPI_COMM_WORLD_RANK, PMIX_RANK and PMI_RANK; use LAUNCHER=srun"
    fi
    per_node="${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-$RANKS_PER_NODE}}"
    LOCAL_RANK="${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-$((RANK % per_node))}}"
    WORLD_SIZE="${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))}}"
    if [ "$per_node" -ne "$RANKS_PER_NODE" ]; then
        refuse "$LAUNCHER started $per_node ranks on this node instead of $RANKS_PER_NODE; submit the job with" \
            "sbatch --ntasks-per-node=$RANKS_PER_NODE"
    fi
    node=$((RANK / per_node)) # if the node's name is not in the list
    # The host name comes first: Hydra, the launcher of MPICH, passes SLURMD_NODENAME of the first node to all ranks.
    this="$(hostname -s)"
    if [[ " ${NODE_NAMES:-} " != *" $this "* ]]; then this="${SLURMD_NODENAME:-}"; fi
    for name in ${NODE_NAMES:-}; do
        if [ "$name" = "$this" ]; then node="$position"; fi
        position=$((position + 1))
    done
    export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE="$per_node"
}

# Ends a job that has lost its first node, and with it the batch script: Slurm would keep it until its time limit. While
# that node does not respond, waits until it does or Slurm removes it from the job.
end_without_batch_script() {
    local job host nodes
    while job=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null); do
        host=$(sed -n 's/^ *BatchHost=//p' <<<"$job")
        nodes=$(scontrol show hostnames "$(sed -n 's/^ *NodeList=//p' <<<"$job")" | tr '\n' ' ')
        if [[ " $nodes" != *" $host "* ]]; then
            echo "node $host is lost, and with it the batch script; canceling job $SLURM_JOB_ID"
            sleep 20 # the launchers of other nodes end
            scancel "$SLURM_JOB_ID"
            return
        fi
        if [[ "$(sinfo -h -n "$host" -o %t)" != *\** ]]; then return; fi
        sleep 10
    done
}

# Runs the launcher of this node in an elastic job, and records its exit code for launch.sh.
elastic() {
    local status=0 failures="$SCAPE_FAILURE_FILE" node="$RANK"
    unset RANK WORLD_SIZE LOCAL_RANK LOG_RANK SCAPE_FAILURE_FILE # the launcher would take the nodes of LOG_RANK for ranks
    export SCAPE_RESTARTS="0 -1" # with it the launcher uses SCAPE_PROGRESS_FILE
    trap : TERM                  # Slurm signals all processes of a task
    ${block[@]+"${block[@]}"} "$PYTHON" -m torchtitan_scape.start "$@" || status=$?
    echo "$status launcher of node $node" >>"$failures" || true
    end_without_batch_script
    exit "$status"
}

if [ "${LAUNCHER:-srun}" = srun ]; then from_slurm; else from_mpi; fi
for name in PYTHON MASTER_ADDR MASTER_PORT LOG_DIR NODE_DIR; do
    if [ -z "${!name:-}" ]; then refuse "$name is not set; start the job with launch.sh, which sets it"; fi
done

# torch uses LOCAL_RANK as the device index. With one GPU per task, every task sees its own GPU as number 0.
for visible in "${ROCR_VISIBLE_DEVICES:-}" "${HIP_VISIBLE_DEVICES:-}" "${CUDA_VISIBLE_DEVICES:-}"; do
    if [ -n "$visible" ] && [[ "$visible" != *,* ]]; then LOCAL_RANK=0; fi
done

# Only rank 0 records the progress for launch.sh.
if [ "$RANK" -ne 0 ] && [ -z "${ELASTIC:-}" ]; then unset SCAPE_PROGRESS_FILE; fi
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # as in machines.sh

# The log of hundreds of ranks is unreadable; launch.sh prints the first error of the ranks that are not shown.
if [[ ",${LOG_RANK:-0}," != *",$RANK,"* ]]; then
    exec >"$LOG_DIR/rank-$RANK.log" 2>&1
fi

# The layout assumes that ranks fill one node after the other. Otherwise the bytes per level would be wrong, and the
# shard axis would cross nodes.
if [ "$((RANK / per_node))" -ne "$node" ]; then
    refuse "rank $RANK is on node $node with SLURM_DISTRIBUTION=${SLURM_DISTRIBUTION:-}, but ranks must fill" \
        "one node after the other, $per_node on each; start them with srun --distribution=block"
fi

reason=$(scripts/slurm/private_folder.sh "$NODE_DIR") || refuse "$reason"

read -ra command <<<"${TRAIN_SCRIPT:--m torchtitan_scape.train}"
if [ -n "${CONFIG_FILE:-}" ]; then command+=(--job.config_file "$CONFIG_FILE"); fi
# Python installs its handlers later; until then signals are blocked, if this version of env can do so. A signal in the
# millisecond in which env starts is lost, because bash can ignore a signal, but not block it.
block=()
if env --block-signal=USR1 true 2>/dev/null; then block=(env --block-signal=USR1); fi
export SCAPE_STOP_REQUESTED
trap '' USR1
if [ -n "${ELASTIC:-}" ]; then elastic "$@"; fi
exec ${block[@]+"${block[@]}"} "$PYTHON" "${command[@]}" "$@"
