"""Construction of the optimizers that `[sync] method` and `[optimizer] name` select, and of their schedulers."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from torchtitan_scape.config.job_config import JobConfig, Optimizer, options_of
from torchtitan_scape.core.parameters import local
from torchtitan_scape.kernels.backends import choose_backend
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.optimizers.muon import ReplicaShare
from torchtitan_scape.optimizers.registry import OPTIMIZERS, decay_groups
from torchtitan_scape.replica.optimizer import ReplicaOptimizer, Replicas
from torchtitan_scape.sharding.base import UPDATE
from torchtitan_scape.sharding.build import build_sharding
from torchtitan_scape.sharding.levels import build_levels, holder_of
from torchtitan_scape.sharding.matrix_cost import divides_matrices
from torchtitan_scape.titan.components import LRSchedulersContainer, OptimizersContainer, build_lr_schedulers
from torchtitan_scape.titan.distributed import ParallelDims
from torchtitan_scape.topology.collectives import OneReplica
from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.in_process import DryRunCollectives, SimulatedReplicas, collectives_of
from torchtitan_scape.topology.layout import Layout, simulated_layout
from torchtitan_scape.topology.machines import Links
from torchtitan_scape.topology.shard_collectives import RankGroup, ShardLedger
from torchtitan_scape.trainer.parallelize import ReplicaParallelDims

logger = logging.getLogger(__name__)


def build_schedulers(optimizers: Any, lr_scheduler_config: Any, training_steps: int) -> LRSchedulersContainer:
    """Build TorchTitan's schedulers for its TrainSpec.

    TorchTitan's formulas continue beyond `total_steps`, where the linear and the root decay become negative, and the
    cosine rises again. Here the rate stays at its minimum, which it reaches one step after `total_steps`.
    """
    total = lr_scheduler_config.total_steps if lr_scheduler_config.total_steps is not None else training_steps
    schedulers = build_lr_schedulers(optimizers, lr_scheduler_config, training_steps)
    for scheduler in schedulers.schedulers:
        scheduler.lr_lambdas = [partial(_until, total, factor) for factor in scheduler.lr_lambdas]
    return schedulers


def _until(total: int, factor: Callable[[int], float], step: int) -> float:
    return factor(min(step, total))


def schedule_text(config: JobConfig) -> str:
    """Return the schedule in words, for the record of a checkpoint."""
    schedule = config.lr_scheduler
    total = config.training.steps if schedule.total_steps is None else schedule.total_steps
    share = "" if schedule.decay_ratio is None else f" in the last {schedule.decay_ratio:g} of them"
    return (
        f"{total} steps, {schedule.warmup_steps} of them warm-up, {schedule.decay_type} decay{share} to "
        f"{schedule.min_lr_factor:g}"
    )


class TitanOptimizers(OptimizersContainer):
    """A `ReplicaOptimizer` as TorchTitan's trainer and schedulers expect it; `OptimizerCheckpoint` has its state.

    TorchTitan iterates over `optimizers` and registers step hooks on the container.
    """

    def __init__(self, model_parts: list[nn.Module], replica: ReplicaOptimizer) -> None:
        self.model_parts, self.replica, self.optimizers = model_parts, replica, [replica]
        self._post_init([p for group in replica.param_groups for p in group["params"]], replica.defaults)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.replica.step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.replica.zero_grad(*args, **kwargs)


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: Optimizer,
    parallel_dims: ParallelDims,
    *,
    job_config: JobConfig,
) -> TitanOptimizers:
    """Build the optimizers for TorchTitan's TrainSpec. The configuration was checked before."""
    assert isinstance(parallel_dims, ReplicaParallelDims) and parallel_dims.groups is not None
    assert len(model_parts) == 1, "check_config refuses schedules with several stages per rank"
    model, sync, entry = model_parts[0], job_config.sync, METHODS[job_config.sync.method]
    groups, simulated = parallel_dims.groups, job_config.topology.simulate_replicas
    if (level_groups := parallel_dims.level_groups) is not None and entry.is_linear:
        # Three-level partitioning sums over nodes itself, so that for the optimizer all ranks form one replica.
        groups = ReplicaGroups(None, level_groups.world, groups.layout)
    assert groups.layout is not None
    replicas = _replicas(groups, simulated, entry.is_linear)
    kernels = choose_backend(sync.kernels, next(model.parameters()).device)
    levels = count = None
    if level_groups is None:
        shard_groups = parallel_dims.shard_groups
        assert shard_groups is not None
        sharding = build_sharding(model, job_config.sharding, shard_groups, replicas.all.ledger, kernels=kernels)
        # Real replicas would each send this traffic: count it once per replica that this update stands for.
        copies = simulated // (len(replicas.endpoints) if entry.options.per_replica_weights else 1)
        count = partial(_count, shard_groups.whole, sharding.ledger, copies)
    else:
        levels = build_levels(
            model,
            job_config.sharding,
            groups.layout,
            level_groups,
            replicas.all.ledger,
            sums=entry.is_linear,
            bf16=job_config.training.mixed_precision_param == "bfloat16",
            kernels=kernels,
        )
        model, sharding = holder_of(levels.parameters), levels.sharding
    options = options_of(sync)
    shapes = [tuple(local(p).shape) for p in model.parameters() if p.requires_grad]
    layout, staged = simulated_layout(groups.layout, simulated), len(replicas.endpoints[0].levels)
    options = options.resolve_for_links(shapes, layout, dist.get_rank(), staged)
    entry.method.prepare_model(model, options)
    share = None if levels is not None else _share_of(job_config, groups.layout, replicas)
    state: dict[str, Any] = {"allocate_state": False} if entry.options.holds_optimizer_state else {}
    optimizer = ReplicaOptimizer(
        partial(_make_optimizer, optimizer_config, kernels=sync.kernels, count=count, share=share, **state),
        options,
        replicas,
        model=model,
        max_norm=float(job_config.training.max_norm),
        reduction="sum",  # the loss is divided by the global number of tokens
        total_steps=job_config.training.steps,
        overlap=sync.overlap,
        max_skipped_steps=sync.max_skipped_steps,
        kernels=sync.kernels,
    )
    optimizer.repairs = sync.on_inconsistency == "repair"
    optimizer.sharding = sharding
    if levels is not None:
        optimizer.attach_levels(levels)
        optimizer.guard.summed_over = "all ranks" if entry.is_linear else "the ranks of its node"
    elif groups.layout.shard * groups.layout.context > 1:
        optimizer.guard.summed_over = "the ranks that hold its replica"
    return TitanOptimizers([model], optimizer)


def _count(rank_group: RankGroup, ledger: ShardLedger, times: int, sizes: Sequence[int]) -> None:
    ledger.count_all_to_all_uneven(rank_group, [times * size for size in sizes], UPDATE)


def _make_optimizer(config: Optimizer, named: Sequence[tuple[str, Tensor]], **arguments: Any) -> torch.optim.Optimizer:
    return OPTIMIZERS[config.name].make(
        decay_groups(named, config.decay_exclude),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        implementation=config.implementation,
        **arguments,
    )


def _share_of(job_config: JobConfig, layout: Layout, replicas: Replicas) -> ReplicaShare | None:
    """Return the division of the optimizer's matrices among replicas if it is predicted to be faster, else None."""
    collectives, links = replicas.all, Links.from_machine(layout.machine)
    options, name = options_of(job_config.sync), job_config.optimizer.name
    simulated, model = job_config.topology.simulate_replicas, workload_of(job_config).whole()
    if simulated > 1 or not divides_matrices(options, name, model, layout, links):
        return None
    logger.info(
        f"{name}: {collectives.replicas} replicas divide the matrix products of a step and gather "
        f"the results, which is predicted to be faster ({links.source}{', nominal' if links.nominal else ''})"
    )

    def all_gather(output: Tensor, input: Tensor) -> None:
        collectives.all_gather(output.view(torch.uint8), input.view(torch.uint8), kind="matrices").wait()

    return ReplicaShare(collectives.replicas, collectives.replica, all_gather)


def _replicas(groups: ReplicaGroups, simulated: int, is_linear: bool) -> Replicas:
    """Return the replicas of this process. A linear method simulates one replica with the sum of all gradients."""
    collectives = collectives_of(groups)
    if simulated == 1:
        return OneReplica(collectives)
    if is_linear or collectives.is_fake:
        return OneReplica(DryRunCollectives(groups, simulated))
    return SimulatedReplicas(simulated, groups)
