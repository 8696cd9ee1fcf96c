# What the jobs of all machines share. Sourced by the .sbatch files, from the repository root.
#
# load_modules "NAME ..."   the modules that the job needs; none for an empty list
# launch ARGUMENT ...       starts RANKS_PER_NODE ranks on every node of the job; arguments go to the trainer
#
# The .sbatch file sets RANKS_PER_NODE, CORES_PER_RANK and SRUN_OPTIONS, an array. Whoever submits may set
#
# CONFIG_FILE   recipe (TOML), or several, "a.toml,b.toml" (set it in front of sbatch: --export would cut it there)
# PYTHON        the Python to use
# LOG_RANK      ranks whose output is shown, "0,1"     LOG_DIR       where that of the others goes
# TRAIN_SCRIPT  instead of "-m torchtitan_scape.train" MODULES       instead of the machine's modules
# MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS            instead of what is found here
# REQUEUE_ON_FAILURE=1   back into the queue too when ranks were lost
# REQUEUE_LIMIT          so often in a row without a step of progress; 3 unless set, 0 for never
#
# Who hears --signal=USR1@300: without "B:" the tasks of the steps do, which are the ranks themselves, and not the
# batch script, which goes on waiting for srun. The ranks agree on a step, write a checkpoint, note it in
# LOG_DIR/progress, and end with exit code 75, all behind a barrier. srun's exit code is the highest of its tasks',
# and with --kill-on-bad-exit that may be 137 of a task that was about to end with 75: the note counts, not the code.
# scancel sends SIGTERM: a checkpoint is written if its grace suffices, and the job does not come back.

refuse() {
    echo "error: $*" >&2
    exit 2
}

# The Python of the shell that submitted: modules may put another one before it.
if [ -z "${PYTHON:-}" ] && [ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then
    PYTHON="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"
fi

# Whether the job may go back into the queue: not again and again from the same step. $1: the step it has come to.
may_requeue() {
    local limit="${REQUEUE_LIMIT:-3}" taken=0 before=-1
    if [ -s "$LOG_DIR/requeues" ]; then read -r taken before <"$LOG_DIR/requeues"; fi
    if [ "$1" -gt "$before" ]; then taken=0; fi
    if [ "$taken" -ge "$limit" ]; then
        echo "error: not put back into the queue: $limit times (REQUEUE_LIMIT) it has not come further than step $1" >&2
        return 1
    fi
    echo "$((taken + 1)) $1" >"$LOG_DIR/requeues"
}

# What follows from how srun ended. $1: its exit code.
requeue() {
    local noted what step why
    noted=$(tail -n 1 "$LOG_DIR/progress" 2>/dev/null || true)
    read -r what step why <<<"$noted"
    if [ "$what" = stopped ]; then
        if [ "$why" != SIGUSR1 ]; then return; fi # by scancel: who cancels a job does not want it back
    elif [ "$1" -eq 2 ] || [ "${REQUEUE_ON_FAILURE:-0}" != 1 ]; then
        return
    fi
    if may_requeue "${step:-0}"; then
        echo "job $SLURM_JOB_ID goes back into the queue (exit code $1, ${noted:-no step taken})"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

load_modules() {
    local names
    read -ra names <<<"$1"
    if [ "${#names[@]}" -eq 0 ]; then return; fi
    if ! command -v module >/dev/null; then
        refuse "there is no 'module' command to load $1 with; MODULES= loads none"
    fi
    module load "${names[@]}" || refuse "module load $1 failed; MODULES names others, 'module avail' lists them"
}

# environment.sh would make .venv where no Python has torchtitan. A job must not: it would pay for the nodes
# meanwhile, compute nodes may have no way to the package index, and only the user knows which torch the GPUs need.
choose_python() {
    local python probe
    probe='import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in ("torch", "torchtitan", "triton")))'
    for python in "${PYTHON:-python3}" "$PWD/.venv/bin/python"; do
        if "$python" -c "$probe" 2>/dev/null; then
            source scripts/environment.sh
            return
        fi
    done
    refuse "${PYTHON:-python3} cannot import torchtitan; set PYTHON to one that can, or run this once before" \
        "submitting: bash -c 'source scripts/environment.sh'"
}

launch() {
    set -euo pipefail # only here: the modules' own functions may not bear it
    local status=0 said recipe recipes
    if [ -z "${SLURM_JOB_ID:-}" ]; then
        refuse "this is no Slurm job; submit it: sbatch --nodes=N $0"
    fi
    if [ -z "${TRAIN_SCRIPT:-}" ] && [ -z "${CONFIG_FILE:-}" ]; then
        refuse "CONFIG_FILE is not set; it names the recipe: CONFIG_FILE=train_configs/llama_1_8b.toml sbatch ..."
    fi
    IFS=, read -ra recipes <<<"${CONFIG_FILE:-}"
    for recipe in "${recipes[@]}"; do
        if [ ! -f "$recipe" ]; then
            refuse "CONFIG_FILE: ${recipe:-an empty name} does not exist; recipes are in train_configs/"
        fi
    done
    choose_python

    # Decided once a job, not once a rank. Rank 0 runs on the first node of the list: ranks fill nodes in blocks.
    MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}"
    # From the job's number, so that two jobs that share a node differ; below the ports that systems give away.
    MASTER_PORT="${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}"
    LOG_DIR="${LOG_DIR:-outputs/slurm/$SLURM_JOB_ID}"
    mkdir -p "$LOG_DIR"
    rm -f "$LOG_DIR/progress"
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then # what the ranks said before: the first error is looked for below
        mkdir -p "$LOG_DIR/start-$((SLURM_RESTART_COUNT - 1))"
        mv "$LOG_DIR"/rank-*.log "$LOG_DIR/start-$((SLURM_RESTART_COUNT - 1))" 2>/dev/null || true
    fi
    export SCAPE_PROGRESS_FILE="$PWD/$LOG_DIR/progress"
    if [[ "$LOG_DIR" == /* ]]; then SCAPE_PROGRESS_FILE="$LOG_DIR/progress"; fi
    export MASTER_ADDR MASTER_PORT LOG_DIR TOKENIZERS_PARALLELISM=false
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-$CORES_PER_RANK}"
    # Kernels are compiled by every rank; home directories are on a network file system that all nodes share.
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$SLURM_JOB_ID}"
    # Taken by srun before the options below, and overriding them, where it is set.
    unset SLURM_HOSTFILE

    # --export=ALL: what is set above must reach the ranks after sbatch --export=CONFIG_FILE=... too.
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))" \
        --ntasks-per-node="$RANKS_PER_NODE" --distribution=block:cyclic --kill-on-bad-exit=1 --export=ALL \
        "${SRUN_OPTIONS[@]}" scripts/slurm/rank.sh "$@" || status=$?
    if [ "$status" -ne 0 ]; then
        requeue "$status"
        said=$(sed -n '/^\[rank [0-9]*\] error: /{p;q;}' "$LOG_DIR"/rank-*.log 2>/dev/null || true)
        echo "error: srun ended with exit code $status: ${said:-the reason stands above or in the logs};" \
            "logs of ranks other than ${LOG_RANK:-0} are in $LOG_DIR" >&2
    fi
    exit "$status"
}
