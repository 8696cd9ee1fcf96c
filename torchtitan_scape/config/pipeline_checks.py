"""Checks of a configuration with pipeline parallelism."""

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.methods.registry import METHODS

# Schedules with one stage per rank.
SCHEDULES = ("1F1B", "GPipe")


def check_pipeline(config: JobConfig) -> None:
    """Check a configuration with several pipeline stages.

    Raises:
        ValueError: A section does not support stages; the message contains the fix.
    """
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
