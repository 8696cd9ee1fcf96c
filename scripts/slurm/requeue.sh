# Functions for the end of a job: requeue, chain, and the command that continues it. Sourced by launch.sh.

# What the user gave, for the command that submits the job again.
GIVEN=""
for name in TRAIN_SCRIPT PYTHON BROADCAST_NODES BROADCAST_FROM NODE_DIR NVME_DIR LOG_RANK \
    MODULES ROCM_MODULE NCCL_NET SRUN_FLAGS RANKS_PER_NODE NNODES PET_RDZV_CONF MAX_RESTARTS \
    STOP_SECONDS LAUNCHER CONTAINER CONTAINER_RUNTIME CONTAINER_MOUNTS REQUEUE REQUEUE_ON_FAILURE REQUEUE_LIMIT; do
    if [ -n "${!name+set}" ]; then GIVEN+="$name=$(printf '%q' "${!name}") "; fi
done

# Prints the command that submits the job again. Arguments: those of the job.
resubmit_command() {
    local script options arguments=""
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
    options="${SLURM_JOB_ACCOUNT:+ -A $SLURM_JOB_ACCOUNT}${SLURM_JOB_PARTITION:+ -p $SLURM_JOB_PARTITION}"
    options+=" --ntasks-per-node=$RANKS_PER_NODE${SLURM_CPUS_PER_TASK:+ --cpus-per-task=$SLURM_CPUS_PER_TASK}"
    options+="${SLURM_GPUS_PER_NODE:+ --gpus-per-node=$SLURM_GPUS_PER_NODE}"
    options+="${SLURM_GPUS_PER_TASK:+ --gpus-per-task=$SLURM_GPUS_PER_TASK}"
    options+="${ELASTIC:+ --no-kill}"
    if [ $# -gt 0 ]; then arguments=$(printf ' %q' "$@"); fi # without arguments printf would print ''
    echo "cd $PWD && CONFIG_FILE=${CONFIG_FILE:-} ${GIVEN}sbatch --nodes=$SLURM_JOB_NUM_NODES$options" \
        "${script:-JOB_FILE}$arguments"
}

# Prints the job of the chain that waits for this one; nothing if there is none.
next_of_chain() {
    sed -n "/^$SLURM_JOB_ID\$/{n;p;}" "${SCAPE_CHAIN:-/dev/null}" 2>/dev/null || true
}

# Returns whether an exit code 2 is a fault of a node or a file system, which the next start may not have: this start has
# completed no step, and the first one of this job or its chain has not refused the same input.
is_fault() {
    [ ! -s "${SCAPE_PROGRESS_FILE:-}" ] && {
        [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] ||
            { [ -s "${SCAPE_CHAIN:-}" ] && [ "$(head -n 1 "$SCAPE_CHAIN")" != "$SLURM_JOB_ID" ]; }
    }
}

# Prints why this job must not be requeued; nothing if it may. The site or the user may exclude requeues: JobRequeue=0
# in slurm.conf, or sbatch --no-requeue.
forbidden() {
    case "${REQUEUE:-1} ${SCAPE_CHAIN:+chain} ${SLURM_JOB_QOS:-} ${SLURM_JOB_PARTITION:-}" in
        *chain*) if [ -n "$(next_of_chain)" ]; then
            echo "the next job of its chain continues"
        else
            echo "it is the last job of its chain"
        fi ;;
        0*) echo "REQUEUE=0" ;;
        *debug* | *-dev*) echo "its queue is for debugging" ;;
        *) # Not with grep -q, which ends before scontrol has written everything: with pipefail that is an error.
            if [[ "$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null || true)" == *Requeue=0* ]]; then
                echo "this job cannot be requeued"
            fi
            ;;
    esac
}

# Returns whether the job may be requeued: a limited number of times at the same step. $1: the last step.
may_requeue() {
    local limit="${REQUEUE_LIMIT:-3}" taken=0 before=-1
    if [ -s "$LOG_DIR/requeues" ]; then read -r taken before <"$LOG_DIR/requeues"; fi
    if [ "$1" -gt "$before" ]; then taken=0 before="$1"; fi
    if [ "$taken" -ge "$limit" ]; then
        echo "error: the job is not requeued: no progress beyond step $before in $limit starts (REQUEUE_LIMIT)" >&2
        return 1
    fi
    echo "$((taken + 1)) $before" >"$LOG_DIR/requeues"
}

# Requeues the job if its end calls for it. $1: exit code of the job; $2 and $3: last event and step of the progress
# file; $4: the signal of a stop.
requeue() {
    local reason
    if [ "$2" = stopped ]; then
        if [ "$4" != SIGUSR1 ]; then return; fi # the job was canceled with scancel
    elif [ "$1" -eq 4 ] || { [ "$1" -eq 2 ] && ! is_fault; } || [ "${REQUEUE_ON_FAILURE:-0}" != 1 ]; then
        return
    fi
    if ! may_requeue "${3:-0}"; then return; fi
    reason=$(forbidden)
    if [ -n "$reason" ]; then
        echo "not requeued: $reason; to continue, with your other options of sbatch: $RESUBMIT"
        return
    fi
    echo "requeueing job $SLURM_JOB_ID (exit code $1, ${2:-no step completed}${2:+ $3})"
    scontrol requeue "$SLURM_JOB_ID" ||
        echo "the requeue failed; to continue, with your other options of sbatch: $RESUBMIT"
}

# Cancels the other jobs of a chain (chain.sh) if they would have nothing to do: training is complete, the input is
# wrong, or the run saves no checkpoints (4), so that each would begin at step 1. After another early end, without a step,
# the next job waits: a node or a file system needs time to recover, and the rest of the chain would fail within minutes.
# $1: exit code of the job.
end_chain() {
    local job
    if [ ! -r "$SCAPE_CHAIN" ]; then return; fi
    if [[ "$1" = [04] ]] || { [ "$1" -eq 2 ] && ! is_fault; }; then
        while read -r job; do
            if [ "$job" != "$SLURM_JOB_ID" ]; then scancel --state=PENDING "$job" || true; fi
        done <"$SCAPE_CHAIN"
        echo "exit code $1: the jobs of the chain that wait are canceled"
    elif [ ! -s "${SCAPE_PROGRESS_FILE:-}" ] && [ "$SECONDS" -lt 1800 ] && job=$(next_of_chain) && [ -n "$job" ]; then
        echo "exit code $1 before the first step: job $job, the next one of the chain, starts in 30 minutes or later"
        scontrol update JobId="$job" StartTime=now+30minutes || true
    fi
}
if [ -n "${SCAPE_CHAIN:-}" ]; then
    trap 'exit 143' TERM # at the time limit, for example; bash would run the next line with code 0
    trap 'end_chain $?' EXIT
fi
