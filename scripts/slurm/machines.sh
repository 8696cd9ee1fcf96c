# Modules and settings of the machines, for jobs and for torchrun. From the repository root:
#
#   source scripts/slurm/machines.sh frontier   # or vista; in a job script, before torchrun -m torchtitan_scape.train
#
# A value that is set already is kept. MODULES replaces the machine's modules ("" for none), NODE_DIR the folder for
# caches and packages on the nodes' own storage, NVME_DIR Frontier's /mnt/bb/USER.

refuse() {
    echo "error: $*" >&2
    exit 2
}

# Use the Python of the submitting shell: modules may put another one first on PATH. A container has its own.
if [ -z "${PYTHON:-}${CONTAINER:-}" ] && [ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then
    PYTHON="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"
fi

load_modules() {
    local names
    read -ra names <<<"$1"
    if [ "${#names[@]}" -eq 0 ]; then return; fi
    if ! command -v module >/dev/null; then
        refuse "there is no 'module' command to load $1; set MODULES= to load none"
    fi
    module load "${names[@]}" || refuse "module load $1 failed; set MODULES to others, 'module avail' lists them"
}

# Prints the ROCm release, such as 7.1, that torch was built for; nothing for other builds. Does not import torch. As in
# launch.sh, the environment .venv is used if PYTHON has no torch.
rocm_of_torch() {
    local python probe
    probe='import importlib.util as u, pathlib, re, sys
found = u.find_spec("torch")
if not found: sys.exit(1)
text = (pathlib.Path(found.origin).parent / "version.py").read_text()
match = re.search(r"^hip[^=]*= *.(\d+\.\d+)", text, re.M)
print(match[1] if match else "")'
    for python in "${PYTHON:-python3}" "$PWD/.venv/bin/python"; do
        if "$python" -c "$probe" 2>/dev/null; then return; fi
    done
}

# Prints the newest rocm module for the torch build. ROCM_MODULE replaces it.
rocm_module() {
    local release available
    if [ -n "${ROCM_MODULE:-}" ]; then
        echo "$ROCM_MODULE"
        return
    fi
    release=$(rocm_of_torch)
    if [ -z "$release" ]; then
        refuse "the torch of ${PYTHON:-python3} is not built for ROCm, so it cannot use MI250X; set PYTHON to one that is," \
            "or ROCM_MODULE"
    fi
    available=$(module -t avail rocm 2>&1 | grep -oE '^rocm/[0-9][0-9.]*' | sort -uV || true)
    grep -E "^rocm/${release//./\\.}(\.|\$)" <<<"$available" | tail -n 1 | grep . ||
        refuse "torch was built for ROCm $release, and there is no module rocm/$release; available:" \
            "$(tr '\n' ' ' <<<"$available"); install a torch for one of these, or set ROCM_MODULE"
}

# Caches on the nodes' own storage: thousands of small files and file locks are slow, or fail, on network file systems.
# Every node converts local text once; its other ranks wait for a file lock. Files that the user has downloaded, and the
# token of the hub, stay where they are. rank.sh creates the folder on the other nodes.
node_local_caches() {
    local home="${HF_HOME:-$HOME/.cache/huggingface}" reason
    NODE_DIR="${NODE_DIR:-/tmp/scape-${USER:-$(id -un)}-${SLURM_JOB_ID:-$$}}"
    export NODE_DIR
    reason=$(scripts/slurm/private_folder.sh "$NODE_DIR") || refuse "$reason"
    export HF_HUB_CACHE="${HF_HUB_CACHE:-$home/hub}" HF_TOKEN_PATH="${HF_TOKEN_PATH:-$home/token}"
    export HF_HOME="${HF_HOME:-$NODE_DIR/huggingface}"
    export HF_DATASETS_CACHE="${HF_DATASETS_CACHE:-$NODE_DIR/datasets}"
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$NODE_DIR/triton}"
    export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$NODE_DIR/inductor}"
    export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
    # Log only errors of C++: the warnings about a lost store have 30 lines each and hide the name of the lost rank.
    export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
}

vista_settings() {
    # As in the guide's section on PyTorch. The compiler is needed at run time, because Triton compiles its launchers.
    local modules="gcc cuda python3"
    if [ -n "${CONTAINER:-}" ]; then modules=tacc-apptainer; fi
    load_modules "${MODULES-$modules}"
    # NCCL finds the InfiniBand adapters and an interface for its bootstrap, so NCCL_IB_HCA and NCCL_SOCKET_IFNAME keep
    # the site's settings. If the bootstrap uses a wrong interface (see NCCL_DEBUG=INFO), set NCCL_SOCKET_IFNAME=ib0
    # (name assumed). Without InfiniBand NCCL would silently fall back to TCP, which is much slower; with NCCL_NET set
    # it stops.
    if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then export NCCL_NET="${NCCL_NET:-IB}"; fi
}

# Puts caches and packages on the two NVMe devices of a node, which a job with sbatch -C nvme has at /mnt/bb/USER.
# Without them they are in /tmp, as on other machines. Containers have /tmp, but not /mnt.
use_nvme() {
    local nvme="${NVME_DIR:-/mnt/bb/${USER:-$(id -un)}}"
    if [ -n "${NODE_DIR:-}" ] || [ ! -d "$nvme" ]; then return; fi
    NODE_DIR="$nvme/scape-${SLURM_JOB_ID:-$$}"
    CONTAINER_MOUNTS="${CONTAINER_MOUNTS:+$CONTAINER_MOUNTS,}$nvme"
}

frontier_settings() {
    local rocm
    use_nvme
    node_local_caches
    # As on the page on PyTorch, with the ROCm release of the torch build. rccl-net-plugin connects RCCL to libfabric
    # and sets many of the variables below; to use another build of the plugin, remove the module and set
    # NCCL_NET_PLUGIN to its librccl-net.so.
    if [ -z "${MODULES+set}" ]; then
        rocm=$(rocm_module) || exit 2
        MODULES="PrgEnv-gnu/8.7.0 cpe/26.03 $rocm rccl-net-plugin craype-accel-amd-gfx90a"
    fi
    load_modules "$MODULES"
    if [ -n "${CRAY_LD_LIBRARY_PATH:-}" ]; then # needed for releases of the programming environment other than the default
        export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
    # RCCL. Use all four adapters for bootstrap and sockets (if this hangs, use hsn0 only), allow rings that change
    # adapters (faster on many nodes), and RDMA between GPU and adapter on the same host bridge (PHB; 3 in older
    # documents).
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn0,hsn1,hsn2,hsn3}"
    export NCCL_CROSS_NIC="${NCCL_CROSS_NIC:-1}"
    export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"
    export HSA_FORCE_FINE_GRAIN_PCIE="${HSA_FORCE_FINE_GRAIN_PCIE:-1}"
    # Without the plugin RCCL would silently fall back to TCP, which is much slower; with NCCL_NET set it stops instead.
    # This name is that of aws-ofi-rccl and of aws-ofi-nccl up to 1.11; later releases of aws-ofi-nccl, whose name is
    # "Libfabric", accept it and "OFI" as well. Not on a single node: Slurm does not configure the network there, and the
    # plugin cannot start.
    if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then export NCCL_NET="${NCCL_NET:-AWS Libfabric}"; fi
    # Checkpoints use gloo, which would take the address of the host name.
    if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ] && [ -e /sys/class/net/hsn0 ]; then
        export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-hsn0}"
    fi

    # As many hardware queues as streams (runtime/device_settings.py), or collectives of different groups share one.
    export GPU_MAX_HW_QUEUES="${GPU_MAX_HW_QUEUES:-8}"

    # libfabric. The cache monitor memhooks, and registered host memory, can deadlock with the plugin.
    export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-kdreg2}"
    export FI_CXI_DISABLE_HOST_REGISTER="${FI_CXI_DISABLE_HOST_REGISTER:-1}"
    # Queue sizes for large jobs; in hybrid mode software matches messages when the adapter's lists are full.
    export FI_CXI_DEFAULT_CQ_SIZE="${FI_CXI_DEFAULT_CQ_SIZE:-131072}"
    export FI_CXI_DEFAULT_TX_SIZE="${FI_CXI_DEFAULT_TX_SIZE:-2048}"
    export FI_CXI_RX_MATCH_MODE="${FI_CXI_RX_MATCH_MODE:-hybrid}"
    # The rendezvous protocol for RCCL at scale, here for messages of all sizes. It needs --network=disable_rdzv_get.
    export FI_CXI_RDZV_PROTO="${FI_CXI_RDZV_PROTO:-alt_read}"
    export FI_CXI_RDZV_EAGER_SIZE="${FI_CXI_RDZV_EAGER_SIZE:-0}"
    export FI_CXI_RDZV_THRESHOLD="${FI_CXI_RDZV_THRESHOLD:-0}"
    export FI_CXI_RDZV_GET_MIN="${FI_CXI_RDZV_GET_MIN:-0}"
    # MIOpen's databases must be on the nodes' local disks: in the home directory, file locks cause I/O errors.
    export MIOPEN_USER_DB_PATH="${MIOPEN_USER_DB_PATH:-$NODE_DIR/miopen}"
    export MIOPEN_CUSTOM_CACHE_DIR="${MIOPEN_CUSTOM_CACHE_DIR:-$MIOPEN_USER_DB_PATH}"
}

case "${1:-}" in
    vista | frontier)
        "$1_settings"
        node_local_caches
        ;;
esac
