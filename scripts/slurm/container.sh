# Functions for ranks in a container. Sourced by launch.sh.
#
# CONTAINER           image: a file, or a name in a registry; all nodes must be able to read it
# CONTAINER_RUNTIME   pyxis or apptainer; by default apptainer for a .sif file, otherwise pyxis
# CONTAINER_MOUNTS    folders of the host that the ranks need besides the repository and LOG_DIR: /data,/scratch/me
#
# rank.sh runs in the container, with PYTHON, by default python3 of the image.

IN_CONTAINER=() # the command before rank.sh
PYXIS=()        # options of srun

container_settings() {
    local mounts name names="PYTHONPATH" gpu=--nv
    if [ -z "${CONTAINER:-}" ]; then return; fi
    PYTHON="${PYTHON:-python3}"
    if [ -z "${CONTAINER_RUNTIME:-}" ]; then
        CONTAINER_RUNTIME=pyxis
        if [[ "$CONTAINER" == *.sif ]]; then CONTAINER_RUNTIME=apptainer; fi
    fi
    mounts="$PWD:$PWD"
    for name in "$(realpath -m "$LOG_DIR")" $(tr , ' ' <<<"${CONTAINER_MOUNTS:-}"); do
        if [[ "$name" == *:* ]]; then mounts+=",$name"; else mounts+=",$name:$name"; fi
    done
    case "$CONTAINER_RUNTIME" in
        pyxis)
            [ "$LAUNCHER" = srun ] || refuse "CONTAINER_RUNTIME=pyxis needs LAUNCHER=srun; use apptainer with $LAUNCHER"
            [[ "$(srun --help 2>&1 || true)" == *--container-image* ]] ||
                refuse "CONTAINER_RUNTIME=pyxis, but srun has no --container-image here; use apptainer"
            # Variables of the image take precedence over those of the job, except for these.
            for name in $(compgen -e); do
                case "$name" in NCCL_* | GLOO_* | FI_* | HF_* | OMP_NUM_THREADS | T*_CACHE_DIR) names+=",$name" ;; esac
            done
            PYXIS=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD"
                --container-env="$names")
            ;;
        apptainer)
            command -v apptainer >/dev/null ||
                refuse "CONTAINER_RUNTIME=apptainer, but there is no apptainer on PATH; load its module with MODULES"
            if [ -e /dev/kfd ]; then gpu=--rocm; fi
            IN_CONTAINER=(apptainer exec "$gpu" --bind "$mounts" --pwd "$PWD" "$CONTAINER")
            ;;
        *) refuse "CONTAINER_RUNTIME=$CONTAINER_RUNTIME; it must be pyxis or apptainer" ;;
    esac
}

# Refuses an image whose Python lacks packages.
check_container() {
    local command=("$PYTHON" -c "$PROBE")
    case "$CONTAINER_RUNTIME" in
        pyxis) command=(srun --nodes=1 --ntasks=1 --export=ALL "${PYXIS[@]}" "${command[@]}") ;;
        apptainer) command=("${IN_CONTAINER[@]}" "${command[@]}") ;;
    esac
    "${command[@]}" || refuse "$PYTHON in CONTAINER=$CONTAINER cannot import torch, triton and torchtitan, or the" \
        "container did not start; see docs/how_to/use_a_container.md"
}
