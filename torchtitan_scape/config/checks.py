"""Checks of a configuration before the run is set up. They raise ValueError with the key, its value and the fix."""

from collections.abc import Callable, Collection
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import torch

from torchtitan_scape.config.job_config import JobConfig, options_of
from torchtitan_scape.core.command import one_line
from torchtitan_scape.methods.registry import METHODS

_INT32 = 2**31 - 1
_SECONDS = 10**8  # three years; larger values overflow the timeouts of process groups
_BELOW_1 = 1 - 1e-12
# By the switch of a section ("" for none): key -> (minimum, maximum). A key that is None is not checked. Values outside
# the range would fail later, or train incorrectly.
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "": {
        "training.local_batch_size": (1, _INT32),
        "training.seq_len": (1, _INT32),
        "training.global_batch_size": (-1, _INT32),
        "training.steps": (0, _INT32),
        "training.gc_freq": (1, _INT32),
        "metrics.log_freq": (1, _INT32),
        "optimizer.lr": (0, 1e6),
        "optimizer.beta1": (0, _BELOW_1),
        "optimizer.beta2": (0, _BELOW_1),
        "optimizer.eps": (0, 1),
        "optimizer.weight_decay": (0, 1e6),
        "lr_scheduler.warmup_steps": (0, _INT32),
        "lr_scheduler.total_steps": (1, _INT32),
        "lr_scheduler.decay_ratio": (0, 1),
        "lr_scheduler.min_lr_factor": (0, 1),
        "activation_checkpoint.memory_budget": (0, 1),
        "comm.init_timeout_seconds": (1, _SECONDS),
        "comm.train_timeout_seconds": (1, _SECONDS),
        "comm.trace_buf_size": (0, _INT32),
        "topology.simulate_replicas": (1, _INT32),
    },
    "validation.enable": {
        "validation.local_batch_size": (1, _INT32),
        "validation.seq_len": (1, _INT32),
        "validation.freq": (1, _INT32),
        "validation.steps": (-1, _INT32),
    },
    "checkpoint.enable": {
        "checkpoint.interval": (1, _INT32),
        "checkpoint.keep_latest_k": (0, _INT32),
        "checkpoint.load_step": (-1, _INT32),
        "checkpoint.copies": (0, _INT32),
    },
    "profiling.enable_memory_snapshot": {"profiling.profile_freq": (1, _INT32)},
    "profiling.enable_profiling": {
        "profiling.profile_freq": (1, _INT32),
        "profiling.profiler_active": (1, _INT32),
        "profiling.profiler_warmup": (0, _INT32),
    },
}
SCHEDULES = ("1F1B", "GPipe")  # with one stage per rank
FLOAT8 = "quantize.linear.float8"


def check_config(config: JobConfig, device_type: str) -> None:
    """Check combinations of sections and the ranges of TorchTitan's keys, on "cpu" or "cuda"."""
    _check_method(config)
    _check_levels(config)
    _check_hugging_face(config)
    if config.parallelism.pipeline_parallel_degree > 1:
        _check_pipeline(config)
    _check_features(config, device_type)
    check_ranges(config)
    if config.training.steps:  # 0 in a dry run
        config.observe.check(config.training.steps)


def import_custom(config: JobConfig) -> None:
    """Import the user's module, which may register model converters, before its names are checked."""
    module = config.experimental.custom_import
    if not module:
        return
    try:
        import_module(module)
    except Exception as error:  # the user's module raises what it likes
        raise ValueError(
            f"[experimental] custom_import = {module!r} cannot be imported: {type(error).__name__}: {one_line(error)}; "
            "correct the module, or add its folder to PYTHONPATH"
        ) from error


def remarks(config: JobConfig) -> list[str]:
    """Return warnings about settings that are valid but probably not intended."""
    round_steps, steps = options_of(config.sync).steps_per_round(), config.training.steps
    lines, schedule = list[str](), config.lr_scheduler
    if (last := schedule.total_steps) is not None and last < steps:
        decays = schedule.decay_ratio != 0.0 and schedule.warmup_steps < last
        rate = config.optimizer.lr * (schedule.min_lr_factor if decays else 1.0)
        lines.append(
            f"[lr_scheduler] total_steps = {last} with [training] steps = {steps}: after step {last} the learning rate "
            f"stays at {rate:g}"
        )
    if 0 < steps < round_steps and not config.sync.flush_at_end:
        lines.append(
            f"[training] steps = {steps} with [sync] method = {config.sync.method!r}, which needs {round_steps} steps "
            "to exchange all parameters: parameters that were not exchanged are validated and saved with their initial "
            "values; [sync] flush_at_end = true exchanges all in the last step"
        )
    folder = Path(config.job.dump_folder, config.checkpoint.folder)
    if steps and not config.checkpoint.enable and any(folder.glob("step-*")):
        lines.append(
            f"{folder} has checkpoints, and [checkpoint] enable = false: the run starts at step 1 and saves none"
        )
    training, validation = config.training, config.validation
    if validation.enable and training.dataset.lower() == validation.dataset.lower() != "prepared":
        trained, validated = (Path(path or "").resolve() for path in (training.dataset_path, validation.dataset_path))
        if trained.is_relative_to(validated) or validated.is_relative_to(trained):
            lines.append(
                f"[validation] dataset = {validation.dataset!r} with dataset_path = {validation.dataset_path!r} reads "
                f"text that is also trained on (training.dataset_path = {training.dataset_path!r}): keep it outside of "
                "the training folder, or prepare the data, which holds documents out"
            )
    return lines


def _check_method(config: JobConfig) -> None:
    """Check the method with the optimizer, the overlap, simulated replicas and codes of the shard axis."""
    optimizer, method = config.optimizer, config.sync.method
    known = METHODS[method].optimizers
    if optimizer.name not in known:
        raise ValueError(
            f"[optimizer] name = {optimizer.name!r} with [sync] method = {method!r}, which supports "
            f"{' or '.join(map(repr, known))}; set [optimizer] name = {known[0]!r}, or another method"
        )
    if config.sync.overlap and not options_of(config.sync).supports_overlap():
        names = " or ".join(repr(name) for name, entry in METHODS.items() if entry.supports_overlap)
        why = " and these options" if METHODS[method].supports_overlap else ""
        raise ValueError(
            f"[sync] overlap = true with method = {method!r}{why}, which needs all gradients before its exchange "
            f"starts; set overlap = false, or method = {names} with its default options"
        )
    simulated, reason = config.topology.simulate_replicas, options_of(config.sync).simulation_error()
    if simulated > 1 and reason:
        raise ValueError(f"[topology] simulate_replicas = {simulated} with [sync.{method}] {reason}")
    section = METHODS[method].options
    differs = section.per_replica_weights or section.holds_optimizer_state
    if config.sharding.sparse and (differs or simulated > 1):
        raise ValueError(
            f"[sharding] gradients_code = {config.sharding.gradients_code!r} with [sync] method = {method!r} and "
            f"simulate_replicas = {simulated}: the residuals of the shard axis would differ between replicas; set "
            "simulate_replicas = 1 and method = 'dense', or [sync] method = 'tagc' and gradients_code = 'dense'"
        )


def _check_features(config: JobConfig, device_type: str) -> None:
    """Refuse features of TorchTitan that are not supported, or not on this device."""
    parallelism = config.parallelism
    refused = {
        "parallelism.expert_parallel_degree": parallelism.expert_parallel_degree > 1,
        "optimizer.early_step_in_backward": config.optimizer.early_step_in_backward,
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        "fault_tolerance.enable": config.fault_tolerance.enable,
        "training.dataloader.num_workers": config.training.dataloader.num_workers != 0,
        "validation.dataloader.num_workers": config.validation.dataloader.num_workers != 0,
    }
    for key, on in refused.items():
        if on:
            raise ValueError(f"{key} is not supported together with [sync]; set it to its default")
    if config.sharding.active and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} with [sharding], which was "
            "not tested with it; set it to 1, or omit [sharding]"
        )
    if device_type == "cpu" and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} on a CPU: PyTorch's ring "
            "attention does not call the CPU's kernels; set it to 1, or run on GPUs"
        )
    if device_type == "cpu" and config.checkpoint.enable and config.checkpoint.async_mode == "async_with_pinned_mem":
        raise ValueError(
            "[checkpoint] async_mode = 'async_with_pinned_mem' on a CPU: pinned memory is for copies from a GPU; set "
            "'async'"
        )
    if config.comm.mode == "local_tensor":
        raise ValueError("comm.mode = 'local_tensor' is not supported; use 'fake_backend' for a dry run")
    if config.training.dtype != "float32":
        raise ValueError(
            f"[training] dtype = {config.training.dtype!r}: without an FP32 master small updates round to zero; "
            "set it to 'float32' and mixed_precision_param = 'bfloat16'; SCAPE can also store weights in BF16, with "
            "[sync.scape] weights_dtype"
        )
    if not config.training.max_norm > 0:
        raise ValueError(
            f"[training] max_norm = {config.training.max_norm}; it must be positive: the trainer always clips, and a "
            "large value, such as 1e9, changes no gradient"
        )


def _check_levels(config: JobConfig) -> None:
    """Refuse settings that [sharding.levels] does not support: they need entire parameters or shards."""
    levels, method = config.sharding.levels, config.sync.method
    if not levels.active:
        return
    setting = f"[sharding.levels] weights = {levels.weights}"
    names = " or ".join(repr(name) for name, entry in METHODS.items() if entry.supports_flat_slices)
    for given, wrong, fix in (
        (f"[sync] method = {method!r}", not METHODS[method].supports_flat_slices, f"set {names}"),
        (
            f"[sharding] gradients_code = {config.sharding.gradients_code!r}",
            config.sharding.sparse,
            "set 'dense', or a code",
        ),
        (
            f"[sync] method = {method!r} with sum_code = {levels.sum_code!r}",
            levels.sum_code != "float32" and not METHODS[method].is_linear,
            'set sum_code = "float32": the method has its own exchange between nodes',
        ),
        ("[sync] overlap = true", config.sync.overlap, "set it to false: gradients are first summed within the node"),
        (
            f"[topology] simulate_replicas = {config.topology.simulate_replicas}",
            config.topology.simulate_replicas > 1,
            "set it to 1, or [sharding.levels] weights = 0 and gradients = 0",
        ),
        (
            '[sync.scape] weights_dtype = "bfloat16"',
            getattr(options_of(config.sync), "weights_dtype", "float32") != "float32",
            'set "float32": FP32 masters are updated, and [training] mixed_precision_param is the dtype of FSDP',
        ),
        (
            f"[checkpoint] export_dtype = {config.checkpoint.export_dtype!r}",
            config.checkpoint.export_dtype != "float32",
            'set "float32": the FP32 masters are exported',
        ),
    ):
        if wrong:
            raise ValueError(f"{given} is not supported with {setting}; {fix}")


def _check_pipeline(config: JobConfig) -> None:
    """Refuse settings that several pipeline stages do not support."""
    parallelism, method, simulated = config.parallelism, config.sync.method, config.topology.simulate_replicas
    training, validation, sharding = config.training, config.validation, config.sharding
    degree, context = parallelism.pipeline_parallel_degree, parallelism.context_parallel_degree
    schedule, size = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_microbatch_size
    table, batch = parallelism.pipeline_parallel_schedule_csv, training.local_batch_size
    names = " or ".join(repr(name) for name, entry in METHODS.items() if entry.supports_pipeline)
    differ = [
        name
        for name in ("local_batch_size", "seq_len")
        if validation.enable and getattr(validation, name) != getattr(training, name)
    ]
    for given, wrong, fix in (
        (f"[sync] method = {method!r}", not METHODS[method].supports_pipeline, f"set {names}"),
        ("[sync] overlap = true", config.sync.overlap, "set it to false"),
        (f"[topology] simulate_replicas = {simulated}", simulated > 1, "set it to 1, and start real replicas"),
        ("[sharding]", sharding.active or sharding.levels.active, "omit it: FSDP's own collectives are supported"),
        ("[observe] enable = true", config.observe.enable, "set it to false"),
        (f"parallelism.context_parallel_degree = {context}", context > 1, "set it to 1"),
        (f"[model] converters = {config.model.converters}", bool(config.model.converters), "omit it"),
        (
            f"parallelism.pipeline_parallel_schedule = {schedule!r}",
            schedule.lower() not in [name.lower() for name in SCHEDULES],
            f"set {' or '.join(map(repr, SCHEDULES))}, with one stage per rank",
        ),
        (f"parallelism.pipeline_parallel_schedule_csv = {table!r}", bool(table), "omit it"),
        (
            f"parallelism.pipeline_parallel_microbatch_size = {size} and [training] local_batch_size = {batch}",
            size < 1 or batch % size != 0 or batch // size < degree,
            f"the size must divide the local batch into {degree} micro-batches or more",
        ),
        *(
            (
                f"[validation] {name} = {getattr(validation, name)} and [training] {name} = {getattr(training, name)}",
                True,
                "set both to the same value: stages receive tensors of one shape",
            )
            for name in differ
        ),
        (
            f"[validation] steps = {validation.steps}",
            validation.enable and validation.steps == -1,
            "set a number of batches: the last batch of a split may be smaller",
        ),
    ):
        if wrong:
            raise ValueError(f"{given} is not supported with parallelism.pipeline_parallel_degree = {degree}; {fix}")


def _check_hugging_face(config: JobConfig) -> None:
    """Refuse Hugging Face checkpoints in training; `torchtitan_scape.export` converts them.

    The conversion needs entire parameters, because shards may split attention heads, and the RoPE theta, which the
    weights do not contain.
    """
    checkpoint = config.checkpoint
    if checkpoint.last_save_in_hf:
        raise ValueError(
            "[checkpoint] last_save_in_hf = true writes weights without config and tokenizer instead of the last "
            "checkpoint; set it to false, and run python -m torchtitan_scape.export afterwards"
        )
    if checkpoint.initial_load_in_hf or checkpoint.initial_load_in_hf_quantized:
        raise ValueError(
            "[checkpoint] initial_load_in_hf = true is not supported: set it to false, run python -m "
            "torchtitan_scape.export import, and set initial_load_path to its output"
        )


def check_ranges(config: JobConfig) -> None:
    """Raise ValueError if a number is outside of the range that its key allows."""
    for switch, ranges in _RANGES.items():
        if switch and not attrgetter(switch)(config):
            continue
        for key, (least, most) in ranges.items():
            value = attrgetter(key)(config)
            if value is not None and not least <= value <= most:
                section, _, name = key.rpartition(".")
                bound = f"{least:g} or more" if value < least else f"{most:g} or less"
                bound = "0 or more, and less than 1" if most == _BELOW_1 else bound
                raise ValueError(f"[{section}] {name} = {value}; it must be {bound}")
    if not config.training.text_column:
        raise ValueError("[training] text_column is empty; it must be the name of a column")
    if config.training.global_batch_size == 0:
        raise ValueError("[training] global_batch_size = 0; it must be 1 or more, or -1 for one micro-batch per rank")
    if config.validation.enable and config.validation.steps == 0:
        raise ValueError("[validation] steps = 0; it must be 1 or more, or -1 for the entire split")
    if config.checkpoint.enable and config.checkpoint.keep_latest_k == 1:
        raise ValueError("[checkpoint] keep_latest_k = 1; it must be 0 (all) or 2 or more: one may be incomplete")
    profiling = config.profiling
    if profiling.enable_profiling and profiling.profile_freq < profiling.profiler_active + profiling.profiler_warmup:
        raise ValueError(
            f"[profiling] profile_freq = {profiling.profile_freq}; it must be profiler_active + profiler_warmup = "
            f"{profiling.profiler_active + profiling.profiler_warmup} or more"
        )
    option = config.activation_checkpoint.selective_ac_option
    if (
        config.activation_checkpoint.mode == "selective"
        and option != "op"
        and not (option.isascii() and option.isdigit() and int(option) > 0)
    ):
        raise ValueError(
            f"[activation_checkpoint] selective_ac_option = {option!r}; it must be 'op' or a number from '1'"
        )


def check_library_keys(config: JobConfig, device_type: str, converters: Callable[[], Collection[str]]) -> None:
    """Check keys that TorchTitan and PyTorch check late, or by an exception without the key's name.

    `converters` returns the names of TorchTitan's model converters.
    """
    compiled = config.compile
    if compiled.enable:
        _check_known("compile.components", compiled.components, ("model", "loss"))
        _check_known("compile.backend", [compiled.backend], torch._dynamo.list_backends(exclude_tags=()))
    if config.model.converters:
        _check_known("model.converters", config.model.converters, converters())
        _check_quantization(config)
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
    """Refuse converters to FP8 and MX formats that change nothing, or that fail later than in TorchTitan's checks."""
    names = [name for name in config.model.converters if name.startswith("quantize.")]
    float8, method = config.quantize.linear.float8, options_of(config.sync)
    gathers = float8.enable_fsdp_float8_all_gather
    # A forward pass has other weights than those at the end of a step.
    others = method.per_replica_weights or (config.sync.overlap and method.divides_update)
    for name in names:
        for wrong, text in (
            (".grouped_mm." in name, "is for MoE layers, which Llama and GPT-2 do not have; remove it"),
            (len(names) > 1, f"and {len(names) - 1} more quantization: select one of quantize.linear.*"),
            (
                name == FLOAT8 and _is_old_amd_gpu(),
                "needs an MI300 or later; remove it, or set --quantize.linear.float8.emulate for a slow test",
            ),
            (
                name == FLOAT8 and gathers and (config.sharding.active or config.sharding.levels.active),
                "with enable_fsdp_float8_all_gather = true and [sharding], which encodes the same messages; set "
                "enable_fsdp_float8_all_gather = false",
            ),
            (
                name == FLOAT8 and gathers and others and float8.precompute_float8_dynamic_scale_for_fsdp,
                "with precompute_float8_dynamic_scale_for_fsdp = true: its scales are those of the weights at the end "
                f"of a step, and method {config.sync.method!r} validates with others, or changes them with "
                "sync.overlap; set precompute_float8_dynamic_scale_for_fsdp = false",
            ),
        ):
            if wrong:
                raise ValueError(f"model.converters has {name!r}, {text}")


def _is_old_amd_gpu() -> bool:
    """Return whether this is an AMD GPU without FP8. TorchTitan compares its number with those of NVIDIA's."""
    return torch.version.hip is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 4)


def _check_known(key: str, values: Collection[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"{key} has {value!r}; known are {', '.join(sorted(known))}")
