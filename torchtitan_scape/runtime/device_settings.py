"""Checks of settings against the device, and the allocator's default."""

from collections.abc import Mapping, MutableMapping

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", ALLOCATOR, "PYTORCH_HIP_ALLOC_CONF")
# Streams that run at once: computation, FSDP's gather, reduction and copy, and those of the exchange.
QUEUES = 8


def set_allocator(environment: MutableMapping[str, str], torch_version: str) -> None:
    """Use expandable segments on CUDA, which avoid fragmentation, unless the user configured the allocator.

    Call it before torch is imported. ROCm does not support them, and a CPU ignores them.
    """
    if "rocm" not in torch_version and not any(name in environment for name in _ALLOCATORS):
        environment[ALLOCATOR] = "expandable_segments:True"


def check_queues(environment: Mapping[str, str], rocm: bool, collectives_overlap: bool) -> list[str]:
    """Return warnings about the hardware queues of a GPU, if collectives of several groups may be in flight at once.

    With a single queue, kernels run in the order in which the host starts them. The ranks may start collectives of
    different groups in different orders, and would then wait for each other forever: ValueError.
    """
    if rocm:
        value = environment.get("GPU_MAX_HW_QUEUES", "4")
        few = value.isdecimal() and int(value) < QUEUES
        if few and collectives_overlap:
            return [
                f"GPU_MAX_HW_QUEUES is {value}, and {QUEUES} streams are in use: collectives of different groups may "
                f"share a queue and delay each other; set GPU_MAX_HW_QUEUES={QUEUES}"
            ]
        return []
    value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", str(QUEUES))
    if value == "1" and collectives_overlap:
        raise ValueError(
            "CUDA_DEVICE_MAX_CONNECTIONS = 1 gives all streams one hardware queue: collectives that ranks start in "
            f"different orders wait for each other forever; unset it, or set it to {QUEUES} or more"
        )
    return []


def check_precision(capability: str, dtype: str) -> list[str]:
    """Return a warning if matrix products in `dtype` are slow on a CPU of `torch.backends.cpu.get_cpu_capability()`."""
    if dtype != "bfloat16" or capability != "AVX2":
        return []
    return [
        '[training] mixed_precision_param = "bfloat16" on a CPU without AVX-512: a step takes ten times as long as '
        'with "float32", or longer'
    ]
