#!/bin/bash
# Submits a job several times, each to start after the one before: for runs longer than a job, where requeues are
# forbidden. From the repository root; arguments after the number of jobs are those of sbatch:
#
#   CONFIG_FILE=train_configs/llama_1_8b.toml,train_configs/machines/vista.toml \
#       scripts/slurm/chain.sh 5 --nodes=8 -A ACCOUNT --time=48:00:00 scripts/slurm/vista.sbatch
#
# Every job continues from the newest checkpoint. It starts after any end of the one before (--dependency=afterany),
# since to Slurm the end of a job that is to be continued is a failure: the time limit (exit code 75), a lost rank or
# node. A job that completes the training, refuses its input (exit code 2), or saves no checkpoints (4), cancels those that
# wait; see end_chain in requeue.sh. No job is requeued.
set -euo pipefail

refuse() {
    echo "error: $*" >&2
    exit 2
}

count="${1:-}"
[[ "$count" =~ ^[1-9][0-9]?$ ]] || refuse "the first argument is '$count'; it must be the number of jobs, 1 to 99"
shift
[ -f scripts/slurm/launch.sh ] || refuse "$PWD is not the repository; start this from its root"
case " $* " in # Frontier user guide, 7 July 2026: "job chaining using the debug QOS is prohibited"
    *" -q debug "* | *" -qdebug "* | *" --qos=debug "* | *" --qos debug "*)
        refuse "a chain must not use the queue for debugging; choose another one"
        ;;
esac

mkdir -p outputs/slurm
SCAPE_CHAIN="$PWD/outputs/slurm/chain-$(date +%Y%m%d-%H%M%S)-$$"
export SCAPE_CHAIN
: >"$SCAPE_CHAIN"
summary() { # also if a later job is refused, for example by a limit of jobs per user
    [ ! -s "$SCAPE_CHAIN" ] ||
        echo "submitted $(paste -sd ' ' "$SCAPE_CHAIN"); to cancel them: scancel \$(cat $SCAPE_CHAIN)"
}
trap summary EXIT
after=()
for ((i = 0; i < count; i++)); do
    answer=$(sbatch --parsable --no-requeue ${after[@]+"${after[@]}"} "$@") || refuse "sbatch failed: $answer"
    job=$(sed -n 's/^\([0-9]\{1,\}\)\(;.*\)\{0,1\}$/\1/p' <<<"$answer" | tail -n 1) # some sites print a banner
    [ -n "$job" ] || refuse "sbatch printed no job number: $answer"
    echo "$job" >>"$SCAPE_CHAIN"
    after=(--dependency="afterany:$job")
done
