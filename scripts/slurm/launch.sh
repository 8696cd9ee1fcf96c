# Functions for the jobs of all machines. Sourced by the .sbatch files, from the repository root.
#
# launch ARGUMENT ...       starts RANKS_PER_NODE ranks on every node of the job; arguments are passed to the trainer
#
# The .sbatch file sets RANKS_PER_NODE, CORES_PER_RANK and the array SRUN_OPTIONS. docs/reference/command_line.md lists
# the variables of the user. Set CONFIG_FILE before sbatch: --export would split it at the comma.
#
# Signals. With --signal=B:USR1@300 this script receives the signal, with every launcher, and passes it to the launcher,
# which passes it to the ranks. The ranks agree on a step, write a checkpoint, record it in LOG_DIR/progress, and exit
# with code 75 after a barrier. scancel sends SIGTERM to the ranks: a checkpoint is written if there is time, and the
# job is not requeued.
#
# With NNODES=2:4 the job is elastic: srun starts one launcher of torchtitan_scape per node, which starts the ranks of its
# node and restarts them without lost nodes. Slurm must keep such a job (sbatch --no-kill).
#
# The exit code of the launcher does not decide about a requeue: after the first failure it kills the other ranks, and
# srun returns the highest code, such as 137 or 143. The files progress and failures in LOG_DIR decide. They exist
# before the ranks start, because a node may see a new file of another one late.

# Before the ranks run, a signal is kept for them: rank.sh passes it on.
LAUNCHER_PROCESS="" USR1_SEEN=""
on_usr1() {
    USR1_SEEN=1
    if [ -n "$LAUNCHER_PROCESS" ]; then pass_signal "$LAUNCHER_PROCESS"; else export SCAPE_STOP_REQUESTED=SIGUSR1; fi
}
trap on_usr1 USR1

source scripts/slurm/requeue.sh
source scripts/slurm/machines.sh
source scripts/slurm/container.sh

# Fails if a package is missing. Does not import them, which takes seconds.
PROBE='import importlib.util as u, sys
sys.exit(any(u.find_spec(name) is None for name in ("torch", "torchtitan", "triton")))'

# Refuses values of variables that would fail later, in every rank or in srun.
check_values() {
    local count='^[1-9][0-9]{0,5}$' tasks cpus
    case "$LAUNCHER" in
        auto | srun | ibrun | mpirun) ;;
        *) refuse "LAUNCHER=$LAUNCHER; it must be auto, srun, ibrun or mpirun" ;;
    esac
    if [ "$LAUNCHER" != auto ] && ! command -v "$LAUNCHER" >/dev/null; then
        refuse "LAUNCHER=$LAUNCHER, but there is no $LAUNCHER on PATH"
    fi
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
    check_elastic
    # srun cannot start more tasks than the allocation has CPUs. The CPUs are known per group of nodes: "72(x2),36".
    tasks="${SLURM_NTASKS_PER_NODE:-$RANKS_PER_NODE}"
    cpus=$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-0}" | sed 's/(.*//' | sort -n | sed -n 1p)
    if [ "$RANKS_PER_NODE" -gt "${tasks%%(*}" ] && [ "$RANKS_PER_NODE" -gt "$cpus" ]; then
        refuse "RANKS_PER_NODE=$RANKS_PER_NODE, but the job has $tasks task(s) per node; submit it with" \
            "sbatch --ntasks-per-node=$RANKS_PER_NODE"
    fi
}

# Sets ELASTIC for a range of nodes; any other value of NNODES is not for this job.
check_elastic() {
    local least most
    ELASTIC=""
    if [[ "${NNODES:-}" != *:* ]]; then return; fi
    [[ "$NNODES" =~ ^([1-9][0-9]{0,4}):([1-9][0-9]{0,4})$ ]] ||
        refuse "NNODES=$NNODES; it must be a smallest and a largest number of nodes, such as 2:4"
    least="${BASH_REMATCH[1]}" most="${BASH_REMATCH[2]}"
    if [ "$SLURM_JOB_NUM_NODES" -lt "$least" ] || [ "$SLURM_JOB_NUM_NODES" -gt "$most" ]; then
        refuse "NNODES=$NNODES, but the job has $SLURM_JOB_NUM_NODES node(s); submit it with sbatch --nodes=$most"
    fi
    [[ "$LAUNCHER" =~ ^(auto|srun)$ ]] || refuse "NNODES=$NNODES needs LAUNCHER=srun, not $LAUNCHER"
    [ -z "${TRAIN_SCRIPT:-}" ] || refuse "NNODES=$NNODES starts the trainer; it cannot start TRAIN_SCRIPT=$TRAIN_SCRIPT"
    if [[ " ${SRUN_OPTIONS[*]} " == *" --gpu"* ]] || [ -n "${SLURM_GPUS_PER_TASK:-}" ]; then
        refuse "NNODES=$NNODES starts one task per node, which needs all GPUs of the node: use a job file without" \
            "--gpus-per-task and --gpu-bind"
    fi
    LAUNCHER=srun ELASTIC=1
}

# environment.sh would create .venv if no Python has torchtitan. A job must not install packages: the nodes would be
# idle, may not reach the package index, and only the user knows which torch build the GPUs need.
choose_python() {
    local python
    for python in "${PYTHON:-python3}" "$PWD/.venv/bin/python"; do
        if "$python" -c "$PROBE" 2>/dev/null; then
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

# Sets COMMAND: LAUNCHER with its options, before a program that every rank runs.
launcher_command() {
    local ranks="$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))" name
    if [ -n "$ELASTIC" ]; then
        COMMAND=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --export=ALL "${SRUN_OPTIONS[@]}"
            --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0)
        if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
            COMMAND+=(--cpus-per-task="$((SLURM_CPUS_PER_TASK * RANKS_PER_NODE))")
        fi
        return
    fi
    case "$LAUNCHER" in
        srun) # --export=ALL: ranks need the variables of this script also after sbatch --export=CONFIG_FILE=...
            COMMAND=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$ranks" --ntasks-per-node="$RANKS_PER_NODE"
                --distribution=block:cyclic --kill-on-bad-exit=1 --export=ALL "${SRUN_OPTIONS[@]}")
            ;;
        ibrun) COMMAND=(ibrun -n "$ranks") ;;
        mpirun)
            COMMAND=(mpirun -np "$ranks" --map-by "ppr:$RANKS_PER_NODE:node" --bind-to none)
            for name in $(compgen -e); do # Open MPI passes no variables to other nodes on its own.
                case "$name" in
                    SLURM_* | SLURMD_* | OMPI_* | PMIX_* | PRTE_* | BASH_FUNC_* | _ | PWD | OLDPWD | SHLVL | HOSTNAME) ;;
                    *) COMMAND+=(-x "$name") ;;
                esac
            done
            ;;
    esac
}

# Replaces LAUNCHER=auto by the first launcher that starts all ranks. Each has 20 s.
choose_launcher() {
    local ranks="$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))" started
    if [ "$LAUNCHER" != auto ]; then return; fi
    for LAUNCHER in srun ibrun mpirun; do
        if ! command -v "$LAUNCHER" >/dev/null; then continue; fi
        launcher_command
        started=$(timeout --kill-after=2 18 "${COMMAND[@]}" echo started 2>/dev/null | grep -cx started || true)
        if [ "$started" -eq "$ranks" ]; then return; fi
        echo "$LAUNCHER started $started of $ranks ranks within 18 s; trying another launcher"
    done
    refuse "no launcher started the $ranks ranks; set LAUNCHER to srun, ibrun or mpirun to see its errors"
}

# Starts rank.sh in every rank and waits for the launcher. Arguments: those of the trainer.
start_ranks() {
    local status=0
    launcher_command
    "${COMMAND[@]}" ${PYXIS[@]+"${PYXIS[@]}"} ${IN_CONTAINER[@]+"${IN_CONTAINER[@]}"} scripts/slurm/rank.sh "$@" &
    LAUNCHER_PROCESS=$!
    while :; do # a signal interrupts wait
        status=0
        wait "$LAUNCHER_PROCESS" || status=$?
        kill -0 "$LAUNCHER_PROCESS" 2>/dev/null || break
    done
    wait "$LAUNCHER_PROCESS" || status=$?
    return "$status"
}

# Creates LOG_DIR and the files by which the ranks report; moves the logs of an earlier start, because `finish` searches
# for the first error.
prepare_logs() {
    local before="start-$((${SLURM_RESTART_COUNT:-0} - 1))"
    LOG_DIR="${LOG_DIR:-outputs/slurm/$SLURM_JOB_ID}"
    mkdir -p "$LOG_DIR"
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
        mkdir -p "$LOG_DIR/$before"
        mv "$LOG_DIR"/rank-*.log "$LOG_DIR/$before" 2>/dev/null || true
    fi
    SCAPE_PROGRESS_FILE="$(realpath "$LOG_DIR")/progress" SCAPE_FAILURE_FILE="$(realpath "$LOG_DIR")/failures"
    : >"$SCAPE_PROGRESS_FILE"
    : >"$SCAPE_FAILURE_FILE"
    export SCAPE_PROGRESS_FILE SCAPE_FAILURE_FILE
}

# Prints how the ranks ended, requeues the job if that calls for it, and exits. $1: exit code of the launcher.
finish() {
    local status="$1" event="" step="" signal="" first="" error
    read -r event step signal < <(tail -n 1 "$SCAPE_PROGRESS_FILE") || true
    read -r first _ <"$SCAPE_FAILURE_FILE" || true
    if [ -n "$ELASTIC" ]; then # The launchers of the nodes that were not lost. 0: the training is complete.
        # Others than the last one may have ended long before, for example because of their node.
        read -r first _ < <(grep -m 1 '^0 ' "$SCAPE_FAILURE_FILE" || tail -n 1 "$SCAPE_FAILURE_FILE") || true
        status="${first:-$status}"
        if [ "$status" -eq 75 ] && [ -n "$USR1_SEEN" ]; then event=stopped signal=SIGUSR1; fi # between two restarts
    fi
    if [[ "$first" =~ ^[1-9][0-9]*$ ]]; then status="$first"; fi # also for 0, which Hydra may report after a signal
    # The messages precede the requeue, which may end this script.
    if [ "$event" = stopped ]; then
        status=75
        echo "stopped on request after step $step, with a checkpoint (exit code 75); submit the same job to continue"
    elif [ "$status" -ne 0 ]; then
        error=$(sed -n '/^\[rank [0-9]*\] error: /{p;q;}' "$LOG_DIR"/rank-*.log 2>/dev/null || true)
        echo "error: the ranks ended with exit code $status: ${error:-see the output above or the logs};" \
            "the logs of ranks other than ${LOG_RANK:-0} are in $LOG_DIR" >&2
    fi
    if [ "$status" -ne 0 ]; then requeue "$status" "$event" "$step" "$signal"; fi
    exit "$status"
}

launch() {
    set -euo pipefail # not earlier: shell functions of the modules may fail with it
    local status=0 recipe recipes
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
    choose_launcher

    # Set once for all ranks. Rank 0 runs on the first node of the list, because ranks fill one node after the other.
    # NODE_NAMES is for ranks of MPI, whose variables do not name the node.
    NODE_NAMES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')
    MASTER_ADDR="${MASTER_ADDR:-${NODE_NAMES%% *}}"
    # Derived from the job id, so that two jobs on one node differ; below the range of ephemeral ports.
    MASTER_PORT="${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}"
    if [ -n "$ELASTIC" ]; then # If the first node is lost, the launcher of the next one serves the rendezvous.
        RDZV_ENDPOINT="${RDZV_ENDPOINT:-$(tr ' ' '\n' <<<"$NODE_NAMES" | sed -n "1,3s/\$/:$MASTER_PORT/p" | paste -sd ,)}"
        export ELASTIC NNODES RDZV_ENDPOINT NGPU="$RANKS_PER_NODE"
    fi
    prepare_logs
    RESUBMIT=$(resubmit_command "$@")
    node_local_caches
    unset SLURM_HOSTFILE # it would override the options of srun
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$CORES_PER_RANK}"
    if [ -n "${CONTAINER:-}" ]; then
        export PYTHONPATH="$PWD" # packages of the host do not fit the image
        container_settings
        check_container
    else
        choose_python
        export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
        broadcast_environment
    fi
    export MASTER_ADDR MASTER_PORT LOG_DIR LAUNCHER RANKS_PER_NODE NODE_NAMES PYTHON

    start_ranks "$@" || status=$?
    finish "$status"
}
