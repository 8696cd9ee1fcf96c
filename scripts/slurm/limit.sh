# Functions for jobs that run several programs one after the other. Sourced by jobs, from the repository root.
#
# limited SECONDS COMMAND...   runs a command; after SECONDS it is ended together with the job steps that it started
#
# GRACE   seconds between SIGTERM and SIGKILL; default 30

# Prints the job's steps that srun or another launcher started and that still run.
running_steps() {
    squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null |
        grep -E "^$SLURM_JOB_ID(\+[0-9]+)?\.[0-9]+$" || true
}

# Waits up to $1 seconds for the end of all steps; returns whether they have ended.
steps_ended() {
    local end=$((SECONDS + $1))
    while [ -n "$(running_steps)" ]; do
        if [ "$SECONDS" -ge "$end" ]; then return 1; fi
        sleep 1
    done
}

limited() {
    local seconds="$1" grace="${GRACE:-30}" status=0 step
    shift
    timeout --kill-after="$grace" "$seconds" "$@" || status=$?
    # timeout ends its process group, which contains srun. A step may outlive a killed srun, and its ranks would slow
    # down the next program.
    if ! steps_ended "$grace"; then
        for step in $(running_steps); do
            echo "ending step $step, which still runs" >&2
            scancel --signal=KILL "$step" || true
        done
        steps_ended 60 || echo "error: steps still run: $(running_steps)" >&2
    fi
    if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
        echo "ended after $seconds s, its share of the job's time (exit code $status)" >&2
    fi
    return "$status"
}
