"""A configured run for the planner: method, shard axis and levels. Imports torch through the configuration."""

from torchtitan_scape.config.job_config import JobConfig, options_of
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.planner.candidates import Candidate, PlanRequest
from torchtitan_scape.planner.checkpoint import Saving
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import predict
from torchtitan_scape.sharding.cost import FlatRow, ShardPlan, flat_rows, shard_memory
from torchtitan_scape.sharding.levels_cost import LevelsPlan
from torchtitan_scape.topology.layout import Layout, plan_layout


def method_of(config: JobConfig) -> PlannedRun:
    """Return the config's method, optimizer and overlap for the planner."""
    return PlannedRun(options_of(config.sync), config.optimizer.name, config.sync.overlap)


def levels_of(config: JobConfig, layout: Layout) -> LevelsPlan | None:
    """Return the closed form of the configured three-level sharding, or None."""
    sums = METHODS[config.sync.method].is_linear
    return config.sharding.plan(layout.replicate, sums, config.training.mixed_precision_param)


def shard_axis_of(config: JobConfig, layout: Layout, on_cpu: bool) -> tuple[ShardPlan, tuple[FlatRow, ...]]:
    """Return the configured shard axis for the planner."""
    reshard = config.parallelism.fsdp_reshard_after_forward
    rows = flat_rows(workload_of(config), layout.shard * layout.context, layout.tensor, reshard)
    return config.sharding.planned(layout, config.training.mixed_precision_param, on_cpu), rows


def configured_candidate(config: JobConfig, case: PlanRequest) -> tuple[Candidate, str]:
    """Return the run that a configuration describes, on the machine and with the batch of the request, and the form of
    its shard axis in words.

    Raises:
        ValueError: The layout or the batch is not possible there, or has an axis without a cost.
    """
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
    levels, (plan, rows) = levels_of(config, layout), shard_axis_of(config, layout, on_cpu=False)
    micro_batch = config.training.local_batch_size
    found = predict(
        method_of(config),
        case.workload,
        layout,
        case.links,
        batch=case.batch,
        micro_batch=micro_batch,
        assumptions=case.assumptions,
        sharding=plan,
        levels=levels,
    )
    if levels is None:
        found.memory.update(shard_memory(plan, rows, layout))
    form = "ZeRO++" if plan.active else "FSDP"
    if levels is not None:
        form = f"three levels over {levels.weights}, {levels.gradients} and {levels.spread} ranks"
    return Candidate(layout, micro_batch, found), form


def saving_of(config: JobConfig) -> Saving | None:
    """Return the checkpoints of a configuration; None if it writes none. A dry run does not know the steps."""
    chosen = config.checkpoint
    if not chosen.enable or chosen.load_only:
        return None
    return Saving(chosen.residual, chosen.keep_latest_k, config.training.steps // chosen.interval)
