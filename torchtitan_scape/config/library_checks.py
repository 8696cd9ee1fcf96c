"""Checks of TorchTitan's keys that it checks late, or by an exception without the key's name."""

from collections.abc import Callable, Collection
from importlib.util import find_spec

import torch

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.extras import install_command

FLOAT8, MX = "quantize.linear.float8", "quantize.linear.mx"


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
        _check_quantization(config)
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


def _check_quantization(config: JobConfig) -> None:
    """Raise ValueError for converters to FP8 and MX formats that fail later, or that change nothing."""
    names = [name for name in config.model.converters if name.startswith("quantize.")]
    float8, compiled = config.quantize.linear.float8, config.compile.enable and "model" in config.compile.components
    emulates = float8.emulate and names == [FLOAT8]
    fp8, mx = _has_capability((8, 9), (9, 4)), _has_capability((10, 0), (9, 5))
    gathers = float8.enable_fsdp_float8_all_gather
    for name in names:
        grouped, needed = ".grouped_mm." in name, "10.0 (MI350)" if name == MX else "8.9 (MI300)"
        for wrong, text in (
            (grouped, "is for MoE layers, which Llama and GPT-2 do not have; remove it"),
            (len(names) > 1, f"and {len(names) - 1} more quantization: select one of quantize.linear.*"),
            (find_spec("torchao") is None, f"needs torchao: {install_command('float8')}, or remove it"),
            (
                name == FLOAT8 and emulates and not fp8 and compiled,
                "with quantize.linear.float8.emulate and a compiled model; set --compile.no-enable",
            ),
            (
                not (mx if name == MX else fp8 or emulates),
                f"needs a GPU of compute capability {needed} or later; remove it"
                + (", or set --quantize.linear.float8.emulate for a slow test" if name == FLOAT8 else ""),
            ),
            (
                name == FLOAT8 and gathers and float8.recipe_name is not None,
                f"with enable_fsdp_float8_all_gather = true and recipe_name = {float8.recipe_name!r}: only tensorwise "
                "scaling supports it; set enable_fsdp_float8_all_gather = false",
            ),
            (
                name == FLOAT8 and gathers and (config.sharding.active or config.sharding.levels.active),
                "with enable_fsdp_float8_all_gather = true and [sharding], which encodes the same messages; set "
                "enable_fsdp_float8_all_gather = false",
            ),
        ):
            if wrong:
                raise ValueError(f"model.converters has {name!r}, {text}")


def _has_capability(cuda: tuple[int, int], rocm: tuple[int, int]) -> bool:
    """Return whether this GPU has at least this compute capability. Those of AMD have other numbers."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (rocm if torch.version.hip else cuda)


def _check_known(key: str, values: Collection[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"{key} has {value!r}; known are {', '.join(sorted(known))}")


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # A parent package is missing, or the name is no name of a module.
        return False
