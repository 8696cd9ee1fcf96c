"""Checks of TorchTitan's keys that it checks late, or by an exception without the key's name."""

from collections.abc import Callable, Collection
from importlib.util import find_spec

import torch

from torchtitan_scape.config.job_config import JobConfig


def check_library_keys(config: JobConfig, device_type: str, converters: Callable[[], Collection[str]]) -> None:
    """Check keys of TorchTitan and PyTorch before the run is set up.

    Args:
        device_type: "cpu" or "cuda".
        converters: returns the names of TorchTitan's model converters.

    Raises:
        ValueError: A value is unknown, or not supported on this device; the message contains the fix.
    """
    compiled, mode = config.compile, config.activation_checkpoint.mode
    if mode == "memory_budget" and not (compiled.enable and "model" in compiled.components):
        raise ValueError(
            "activation_checkpoint.mode = 'memory_budget' needs a compiled model; set --compile.enable, or another mode"
        )
    if compiled.enable:
        _check_known("compile.components", compiled.components, ("model", "loss"))
        _check_known("compile.backend", [compiled.backend], torch._dynamo.list_backends(exclude_tags=()))
    if config.model.converters:
        _check_known("model.converters", config.model.converters, converters())
    module = config.experimental.custom_import
    if module and not _is_importable(module):
        raise ValueError(
            f"experimental.custom_import = {module!r}: Python finds no such module on its path (PYTHONPATH)"
        )
    if device_type == "cpu":
        gpu_only = {
            "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
            "training.gc_debug": config.training.gc_debug,
        }
        for key, on in gpu_only.items():
            if on:
                raise ValueError(f"{key} = true on a CPU: it records the memory of a GPU; set it to false")
    longest = config.training.seq_len
    # GPT-2 has learned positions, whose number the trainer checks.
    rotary = config.model.name == "llama3"
    if rotary and config.validation.enable and config.validation.seq_len > longest:
        raise ValueError(
            f"validation.seq_len = {config.validation.seq_len} is larger than training.seq_len = {longest}, for which "
            f"the positions are computed; set --validation.seq_len={longest}"
        )


def _check_known(key: str, values: Collection[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"{key} has {value!r}; known are {', '.join(sorted(known))}")


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # A parent package is missing, or the name is no name of a module.
        return False
