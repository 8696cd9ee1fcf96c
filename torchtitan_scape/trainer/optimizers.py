"""The optimizers that `[sync] method` and `[optimizer] name` ask for."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn as nn
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims

from kernels import choose_backend
from topology.dry_run import DryRunCollectives
from topology.groups import ReplicaGroups
from topology.in_process import OneReplica, SimulatedReplicas
from topology.layout import simulated_layout
from topology.process_groups import collectives_of
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from torchtitan_scape.config.job_config import JobConfig, options_of
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.registry import OPTIMIZERS
from torchtitan_scape.replica.local import LocalOptimizers
from torchtitan_scape.replica.optimizer import ReplicaOptimizersBase, Replicas, SyncedOptimizers
from torchtitan_scape.replica.own_step import OwnStepOptimizers
from torchtitan_scape.sharding.base import UPDATE
from torchtitan_scape.sharding.build import build_sharding
from torchtitan_scape.sharding.levels import holder_of
from torchtitan_scape.sharding.levels_build import build_levels
from torchtitan_scape.trainer.parallelize import ReplicaParallelDims


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    *,
    job_config: JobConfig,
) -> ReplicaOptimizersBase:
    """For TorchTitan's TrainSpec. The configuration has been checked: method and optimizer go together."""
    assert isinstance(parallel_dims, ReplicaParallelDims) and parallel_dims.groups is not None
    assert len(model_parts) == 1, "pipeline parallelism is refused at start"
    sync, entry, groups = job_config.sync, METHODS[job_config.sync.method], parallel_dims.groups
    rates: dict[str, Any] = dict(
        lr=optimizer_config.lr,
        betas=(optimizer_config.beta1, optimizer_config.beta2),
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
    )
    common: dict[str, Any] = dict(
        max_norm=float(job_config.training.max_norm), max_skipped_steps=sync.max_skipped_steps, kernels=sync.kernels
    )
    options = options_of(sync)
    if (over := parallel_dims.level_groups) is not None and entry.is_linear:
        # Three levels sum over nodes themselves: to the optimizer all ranks hold one replica together.
        groups = ReplicaGroups(None, over.world, groups.layout)
    replicas = _replicas(groups, job_config.topology.simulate_replicas, entry.is_linear)
    assert groups.layout is not None
    kernels = choose_backend(sync.kernels, next(model_parts[0].parameters()).device)
    made: dict[str, Any] = dict(kernels=kernels, seed=job_config.debug.seed or 0)
    levels = count = None
    if over is None:
        shard_groups = parallel_dims.shard_groups
        assert shard_groups is not None
        sharding = build_sharding(model_parts[0], job_config.sharding, shard_groups, replicas.all.ledger, **made)
        # Of simulated replicas that share an update each would send it; in a dry run all share one.
        local = entry.method is not None and entry.method.local
        alike = job_config.topology.simulate_replicas // (len(replicas.endpoints) if local else 1)
        count = partial(_count, shard_groups.whole, sharding.ledger, alike)
    else:
        made |= dict(sums=entry.is_linear, bf16=job_config.training.mixed_precision_param == "bfloat16")
        levels = build_levels(model_parts[0], job_config.sharding, groups.layout, over, replicas.all.ledger, **made)
        model_parts, sharding = [holder_of(levels.parameters)], levels.sharding
    optimizers: ReplicaOptimizersBase
    if entry.optimizer is not None:
        assert groups.layout is not None
        named = [(name, p) for name, p in model_parts[0].named_parameters() if p.requires_grad]
        layout = simulated_layout(groups.layout, job_config.topology.simulate_replicas)
        make = entry.optimizer(model_parts[0], named, options, layout, **rates, **common, reduction="sum")
        optimizers = OwnStepOptimizers(model_parts, make, replicas)
    else:
        assert entry.method is not None
        make_optimizer = partial(
            OPTIMIZERS[optimizer_config.name].make,
            **rates,
            implementation=optimizer_config.implementation,
            kernels=sync.kernels,
            count=count,
        )
        kind = LocalOptimizers if entry.method.local else SyncedOptimizers
        method, steps = partial(entry.method, options=options), job_config.training.steps
        optimizers = kind(model_parts, make_optimizer, method, replicas, **common, steps=steps, overlap=sync.overlap)
    optimizers.repairs = sync.on_inconsistency == "repair"
    optimizers.sharding = sharding
    if levels is not None:
        optimizers.attach_levels(levels)
        optimizers.guard.summed_over = "all ranks" if entry.is_linear else "the ranks of its node"
    elif groups.layout.shard * groups.layout.context > 1:
        optimizers.guard.summed_over = "the ranks that hold its replica"
    return optimizers


def _count(rank_group: RankGroup, ledger: ShardLedger, times: int, sizes: Sequence[int]) -> None:
    ledger.count_all_to_all_uneven(rank_group, [times * size for size in sizes], UPDATE)


def _replicas(groups: ReplicaGroups, simulated: int, is_linear: bool) -> Replicas:
    """Those that this process plays: of a method that adds up, one whose gradient is the sum of all."""
    collectives = collectives_of(groups)
    if simulated == 1:
        return OneReplica(collectives)
    if is_linear or collectives.is_fake:
        return OneReplica(DryRunCollectives(groups, simulated))
    return SimulatedReplicas(simulated, groups)
