"""A configured run for the planner: method, shard axis and levels. Imports torch through the configuration."""

from dataclasses import replace

from torchtitan_scape.config.checks import check_config, check_ranges
from torchtitan_scape.config.job_config import JobConfig, options_of
from torchtitan_scape.core.workloads import local_shapes
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.optimizers.registry import check_layout
from torchtitan_scape.planner.candidates import Candidate, PlanRequest
from torchtitan_scape.planner.run import PlannedRun, Saving
from torchtitan_scape.planner.step import predict
from torchtitan_scape.sharding.cost import FlatRow, LevelsPlan, ShardPlan, flat_rows
from torchtitan_scape.topology.layout import Layout, plan_layout


def method_of(config: JobConfig) -> PlannedRun:
    """Return the config's method, optimizer and overlap for the planner."""
    return PlannedRun(options_of(config.sync), config.optimizer.name, config.sync.overlap)


def shard_axis_of(
    config: JobConfig, layout: Layout, on_cpu: bool = False
) -> tuple[ShardPlan | LevelsPlan, tuple[FlatRow, ...]]:
    """Return the configured shard axis for the planner, and its rows."""
    reshard, dtype = config.parallelism.fsdp_reshard_after_forward, config.training.mixed_precision_param
    rows = flat_rows(workload_of(config), layout.shard * layout.context, layout.tensor, reshard)
    sums = METHODS[config.sync.method].is_linear
    return config.sharding.planned(layout, dtype, sums=sums, on_cpu=on_cpu), rows


def configured_candidate(config: JobConfig, case: PlanRequest) -> tuple[Candidate, str]:
    """Return the run that a configuration describes, on the machine and with the batch of the request, and the form of
    its shard axis in words.

    Raises:
        ValueError: The trainer refuses the configuration, the layout or the batch is not possible there, or an axis has
            no cost.
    """
    check_config(config, "cuda" if case.machine.device.runtime else "cpu")
    degrees = config.parallelism
    for axis in ("context", "tensor"):
        if (degree := getattr(degrees, f"{axis}_parallel_degree")) > 1:
            raise ValueError(f"parallelism.{axis}_parallel_degree = {degree}: the planner has no cost of that axis")
    layout = plan_layout(
        case.ranks,
        ranks_per_node=case.ranks_per_node,
        machine=case.machine,
        replicate=degrees.data_parallel_replicate_degree,
        shard=degrees.data_parallel_shard_degree,
    )
    check_layout(config.optimizer.name, layout, config.sharding.levels.active)
    config.sharding.check(layout)
    shard_axis, _ = shard_axis_of(config, layout)
    run, micro_batch = method_of(config), config.training.local_batch_size
    # As in the trainer: values that the options choose for the model
    options = run.options.resolve(local_shapes(case.workload.shapes(), layout.shard), layout.replicate)
    prediction = predict(
        replace(run, options=options),
        case.workload,
        layout,
        case.links,
        batch=case.batch,
        micro_batch=micro_batch,
        assumptions=case.assumptions,
        shard_axis=shard_axis,
    )
    if isinstance(shard_axis, LevelsPlan):
        degrees = f"{shard_axis.weights}, {shard_axis.gradients} and {shard_axis.shards(layout)}"
        form = f"three levels over {degrees} ranks"
    else:
        form = "ZeRO++" if shard_axis.active else "FSDP"
    return Candidate(layout, micro_batch, prediction), form


def saving_of(config: JobConfig) -> Saving | None:
    """Return the checkpoints of a configuration; None if it writes none. A dry run does not know the steps.

    Raises:
        ValueError: A number of the configuration is outside of its range.
    """
    check_ranges(config)
    chosen = config.checkpoint
    if not chosen.enable or chosen.load_only:
        return None
    count = config.training.steps // chosen.interval
    return Saving(chosen.residual, chosen.keep_latest_k, count, chosen.copies)
