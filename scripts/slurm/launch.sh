# Functions for the jobs of all machines. Sourced by the .sbatch files, from the repository root.
#
# launch ARGUMENT ...       starts RANKS_PER_NODE ranks on every node of the job; arguments are passed to the trainer
#
# The .sbatch file sets RANKS_PER_NODE, CORES_PER_RANK and the array SRUN_OPTIONS, and RESUBMIT_OPTIONS
# and RESUBMIT_VARIABLES if sbatch needs more than the file contains. docs/reference/command_line.md lists the
# variables of the user. Set CONFIG_FILE before sbatch: --export would split it at the comma.
#
# Signals. Without "B:", --signal=USR1@300 signals the tasks of the steps, which are the ranks, and not the batch
# script, which continues to wait for srun. The ranks agree on a step, write a checkpoint, record it in
# LOG_DIR/progress, and exit with code 75 after a barrier. srun returns the highest exit code of its tasks. With
# --kill-on-bad-exit this may be 137 from a task that was about to exit with 75, so the progress file decides, not the
# exit code. scancel sends SIGTERM: a checkpoint is written if there is time, and the job is not requeued.
#
# ibrun and mpirun start daemons as tasks, which do not pass a signal to the ranks. Submit such jobs with
# --signal=B:USR1@300: this script receives the signal and passes it to the launcher, which passes it to the ranks.

# scancel --signal=USR1 --batch would end the script. A handler, unlike an ignored signal, is not inherited by srun.
trap : USR1

source scripts/slurm/machines.sh

# Returns whether the job may be requeued: a limited number of times at the same step. $1: the last step.
may_requeue() {
    local limit="${REQUEUE_LIMIT:-3}" taken=0 before=-1
    if [ -s "$LOG_DIR/requeues" ]; then read -r taken before <"$LOG_DIR/requeues"; fi
    if [ "$1" -gt "$before" ]; then taken=0; fi
    if [ "$taken" -ge "$limit" ]; then
        echo "error: the job is not requeued: no progress beyond step $1 in $limit starts (REQUEUE_LIMIT)" >&2
        return 1
    fi
    echo "$((taken + 1)) $1" >"$LOG_DIR/requeues"
}

# Requeues the job if the result of srun calls for it. $1: exit code of srun.
requeue() {
    local recorded event step signal shown
    recorded=$(tail -n 1 "$LOG_DIR/progress" 2>/dev/null || true)
    read -r event step signal <<<"$recorded"
    if [ "$event" = stopped ]; then
        if [ "$signal" != SIGUSR1 ]; then return; fi # the job was canceled with scancel
    elif [ "$1" -eq 2 ] || [ "${REQUEUE_ON_FAILURE:-0}" != 1 ]; then
        return
    fi
    if ! may_requeue "${step:-0}"; then return; fi
    # The site or the user may exclude requeues: JobRequeue=0 in slurm.conf, or sbatch --no-requeue.
    # Not with grep -q, which ends before scontrol has written everything: with pipefail that is an error.
    shown=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null || true)
    if [ "${REQUEUE:-1}" = 0 ] || [[ "$shown" == *Requeue=0* ]]; then
        echo "this job cannot be requeued; to continue: $RESUBMIT"
        return
    fi
    echo "requeueing job $SLURM_JOB_ID (exit code $1, ${recorded:-no step completed})"
    scontrol requeue "$SLURM_JOB_ID" || echo "the requeue failed; to continue: $RESUBMIT"
}

# Prints the command that submits the job again. Arguments: those of the job.
resubmit_command() {
    local script account="" command
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
    if [ -n "${SLURM_JOB_ACCOUNT:-}" ]; then account=" -A $SLURM_JOB_ACCOUNT"; fi
    command="CONFIG_FILE=${CONFIG_FILE:-} ${RESUBMIT_VARIABLES:-}sbatch --nodes=$SLURM_JOB_NUM_NODES$account${RESUBMIT_OPTIONS:-}"
    echo "cd $PWD && $command ${script:-JOB_FILE}$(printf ' %q' "$@")"
}

# Refuses values of variables that would fail later, in every rank or in srun.
check_values() {
    local count='^[1-9][0-9]{0,5}$' tasks cpus
    case "$LAUNCHER" in
        srun | ibrun | mpirun) ;;
        *) refuse "LAUNCHER=$LAUNCHER; it must be srun, ibrun or mpirun" ;;
    esac
    command -v "$LAUNCHER" >/dev/null || refuse "LAUNCHER=$LAUNCHER, but there is no $LAUNCHER on PATH"
    if [ "$LAUNCHER" = mpirun ] && ! [[ "$(mpirun --version 2>&1 || true)" =~ "Open MPI"|OpenRTE ]]; then
        refuse "LAUNCHER=mpirun, but $(command -v mpirun) is not that of Open MPI; use srun or ibrun"
    fi
    [[ "${BROADCAST_NODES:-64}" =~ ^[0-9]{1,6}$ ]] ||
        refuse "BROADCAST_NODES=$BROADCAST_NODES; it must be a number of nodes, or 0 for never"
    [[ "${REQUEUE:-1}" =~ ^[01]$ ]] || refuse "REQUEUE=$REQUEUE; it must be 0 or 1"
    [[ "$RANKS_PER_NODE" =~ $count ]] ||
        refuse "RANKS_PER_NODE=$RANKS_PER_NODE; it must be the number of ranks per node, 1 or more"
    [[ "${MASTER_PORT:-1}" =~ $count ]] || refuse "MASTER_PORT=$MASTER_PORT; it must be a number, 1 or more"
    [[ "${REQUEUE_LIMIT:-0}" =~ ^[0-9]{1,6}$ ]] || refuse "REQUEUE_LIMIT=$REQUEUE_LIMIT; it must be a number, 0 or more"
    [[ "${LOG_RANK:-0}" =~ ^[0-9]+(,[0-9]+)*$ ]] ||
        refuse "LOG_RANK=$LOG_RANK; it must be ranks with commas between, such as 0,1"
    # srun cannot start more tasks than the allocation has CPUs. The CPUs are known per group of nodes: "72(x2),36".
    tasks="${SLURM_NTASKS_PER_NODE:-$RANKS_PER_NODE}"
    cpus=$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-0}" | sed 's/(.*//' | sort -n | sed -n 1p)
    if [ "$RANKS_PER_NODE" -gt "${tasks%%(*}" ] && [ "$RANKS_PER_NODE" -gt "$cpus" ]; then
        refuse "RANKS_PER_NODE=$RANKS_PER_NODE, but the job has $tasks task(s) per node; submit it with" \
            "sbatch --ntasks-per-node=$RANKS_PER_NODE"
    fi
}

# environment.sh would create .venv if no Python has torchtitan. A job must not install packages: the nodes would be
# idle, may not reach the package index, and only the user knows which torch build the GPUs need.
choose_python() {
    local python probe
    probe='import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in ("torch", "torchtitan", "triton")))'
    for python in "${PYTHON:-python3}" "$PWD/.venv/bin/python"; do
        if "$python" -c "$probe" 2>/dev/null; then
            source scripts/environment.sh trainer
            return
        fi
    done
    refuse "${PYTHON:-python3} cannot import torch, triton and torchtitan; set PYTHON to one that can, or install" \
        "them on this machine before submitting, see docs/getting_started/install.md"
}

# Copies the Python packages to the nodes of a large job. Thousands of ranks that import from one file system take
# minutes to start, and slow it down for others. One archive is sent along a tree and unpacked on every node.
broadcast_environment() {
    local least="${BROADCAST_NODES:-64}" from archive target="$NODE_DIR/packages" reason
    if [ "$least" -eq 0 ] || [ "$SLURM_JOB_NUM_NODES" -lt "$least" ]; then return; fi
    if [ "$LAUNCHER" != srun ] || ! command -v sbcast >/dev/null; then
        echo "the Python packages are not copied to the nodes: this needs srun and sbcast"
        return
    fi
    from="${BROADCAST_FROM:-$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}"
    archive="$LOG_DIR/packages.tar"
    reason=$(on_every_node scripts/slurm/private_folder.sh "$NODE_DIR") || refuse "${reason:-srun failed}"
    echo "copying $from to $SLURM_JOB_NUM_NODES nodes, into $target"
    tar -cf "$archive" -C "$from" .
    sbcast --force "$archive" "$target.tar"
    rm -f "$archive"
    on_every_node sh -c "mkdir -p '$target' && tar -xf '$target.tar' -C '$target'"
    on_every_node rm -f "$target.tar"
    export PYTHONPATH="$PYTHONPATH:$target"
}

# Passes USR1 to the launcher. If that is a shell script, which the signal would end, its children receive it. A script
# may also have replaced itself by the program, whose children are daemons that the signal would end.
pass_signal() {
    case "$(readlink "/proc/$1/exe" || true)" in
        */sh | */bash | */dash | */ksh* | */zsh*) if pkill -USR1 -P "$1"; then return; fi ;;
    esac
    kill -USR1 "$1" 2>/dev/null || true
}

on_every_node() {
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --export=ALL "$@"
}

# Starts rank.sh in every rank with LAUNCHER. Arguments: those of the trainer.
start_ranks() {
    local ranks="$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))" name child status=0 forward=()
    case "$LAUNCHER" in
        srun)
            # --export=ALL: ranks need the variables above also after sbatch --export=CONFIG_FILE=...
            srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$ranks" \
                --ntasks-per-node="$RANKS_PER_NODE" --distribution=block:cyclic --kill-on-bad-exit=1 --export=ALL \
                "${SRUN_OPTIONS[@]}" scripts/slurm/rank.sh "$@"
            return
            ;;
        ibrun) set -- ibrun -n "$ranks" scripts/slurm/rank.sh "$@" ;;
        mpirun)
            # Open MPI passes no variables to other nodes on its own.
            for name in $(compgen -e); do
                case "$name" in SLURM_* | SLURMD_* | OMPI_* | PMIX_* | PRTE_* | BASH_FUNC_* | _ | PWD | OLDPWD | SHLVL | HOSTNAME) ;;
                    *) forward+=(-x "$name") ;;
                esac
            done
            set -- mpirun -np "$ranks" --map-by "ppr:$RANKS_PER_NODE:node" --bind-to none "${forward[@]}" \
                scripts/slurm/rank.sh "$@"
            ;;
    esac
    "$@" &
    child=$!
    trap 'pass_signal "$child"' USR1
    while :; do # a signal interrupts wait
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break
    done
    wait "$child" || status=$?
    trap : USR1
    return "$status"
}

launch() {
    set -euo pipefail # not earlier: shell functions of the modules may fail with it
    local status=0 error recipe recipes event step
    LAUNCHER="${LAUNCHER:-srun}"
    if [ -z "${SLURM_JOB_ID:-}" ]; then
        refuse "this is not a Slurm job; submit it: sbatch --nodes=N $0"
    fi
    if [ -z "${TRAIN_SCRIPT:-}" ] && [ -z "${CONFIG_FILE:-}" ]; then
        refuse "CONFIG_FILE is not set; set it to a recipe: CONFIG_FILE=train_configs/llama_1_8b.toml sbatch ..."
    fi
    IFS=, read -ra recipes <<<"${CONFIG_FILE:-}"
    for recipe in "${recipes[@]}"; do
        if [ ! -f "$recipe" ]; then
            refuse "CONFIG_FILE: ${recipe:-an empty name} does not exist; recipes are in train_configs/"
        fi
    done
    check_values
    choose_python

    # Set once for all ranks. Rank 0 runs on the first node of the list, because ranks fill one node after the other.
    MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}"
    # Derived from the job id, so that two jobs on one node differ; below the range of ephemeral ports.
    MASTER_PORT="${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}"
    LOG_DIR="${LOG_DIR:-outputs/slurm/$SLURM_JOB_ID}"
    mkdir -p "$LOG_DIR"
    rm -f "$LOG_DIR/progress"
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then # move old logs, because the first error is searched for below
        mkdir -p "$LOG_DIR/start-$((SLURM_RESTART_COUNT - 1))"
        mv "$LOG_DIR"/rank-*.log "$LOG_DIR/start-$((SLURM_RESTART_COUNT - 1))" 2>/dev/null || true
    fi
    export SCAPE_PROGRESS_FILE="$PWD/$LOG_DIR/progress"
    if [[ "$LOG_DIR" == /* ]]; then SCAPE_PROGRESS_FILE="$LOG_DIR/progress"; fi
    RESUBMIT=$(resubmit_command "$@")
    # For ranks of MPI, whose variables do not name the node.
    NODE_NAMES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')
    export MASTER_ADDR MASTER_PORT LOG_DIR LAUNCHER RANKS_PER_NODE NODE_NAMES PYTHON
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-$CORES_PER_RANK}"
    node_local_caches
    # If set, it would override the options of srun below.
    unset SLURM_HOSTFILE
    broadcast_environment

    start_ranks "$@" || status=$?
    # The messages precede the requeue, which may end this script.
    read -r event step _ < <(tail -n 1 "$LOG_DIR/progress" 2>/dev/null || true) || true
    if [ "${event:-}" = stopped ]; then
        status=75 # srun reports the code of any rank, and Hydra may report 0 after a signal
        echo "stopped on request after step $step, with a checkpoint (exit code 75); submit the same job to continue"
    elif [ "$status" -ne 0 ]; then
        error=$(sed -n '/^\[rank [0-9]*\] error: /{p;q;}' "$LOG_DIR"/rank-*.log 2>/dev/null || true)
        echo "error: $LAUNCHER ended with exit code $status: ${error:-see the output above or the logs};" \
            "the logs of ranks other than ${LOG_RANK:-0} are in $LOG_DIR" >&2
    fi
    if [ "$status" -ne 0 ]; then requeue "$status"; fi
    exit "$status"
}
