"""Train with TorchTitan 0.3.0's own trainer: FSDP2 shards inside a node, `replicate` synchronizes between nodes.

    torchrun --nproc_per_node=4 -m scripts.examples.titan_trainer --optimizer.method quantized_update --optimizer.muon \
        --parallelism.data_parallel_replicate_degree 2 --training.steps 20

It needs an environment of its own, with torch 2.14 or later; see docs/getting_started/own_loop.md. The options are
TorchTitan's, with `--optimizer.method` and `--optimizer.muon` added. `with_replicas` converts any configuration of
TorchTitan's trainer that uses data parallelism alone:

- FSDP2 gets the shard dimension only, through `ModelSpec.parallelize_fn`. Over both, it would all-reduce gradients.
- The optimizer is wrapped by `replicate` in `ModelSpec.post_optimizer_build_fn`, which runs before the LR scheduler is
  built. TorchTitan divides the loss by the tokens of all ranks, hence `reduction="sum"`.
- `training.max_norm` is applied by `replicate`. TorchTitan clips before the step, when the replicas' gradients differ.
- Checkpoints contain the state of every replica, and another number of replicas or shards can load them.
"""

import argparse
import copy
import math
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer
from torchtitan_scape import AdamS, Muon, checkpoint_states, load_checkpoint, replicate


class ReplicaOptimizers(OptimizersContainer):
    """TorchTitan's optimizer of one model, inside a `ReplicaOptimizer`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        method: str = "dense"  # a name of the method registry
        muon: bool = False  # Muon with the learning rate of the first param group, instead of TorchTitan's optimizer
        max_norm: float = 1.0  # set from training.max_norm
        total_steps: int = 0  # set from training.steps

    def __init__(self, config: Config, *, model_parts: list[Any]) -> None:
        super().__init__(config, model_parts=model_parts)
        self.config = config

    @staticmethod
    def synchronize(following: Any, container: Any, model_parts: list[Any], parallel_dims: Any) -> None:
        """Wrap the optimizer: a `ModelSpec.post_optimizer_build_fn`, which calls the `following` one of the model."""
        config, (model,), (optimizer,) = container.config, model_parts, container.optimizers
        rate = optimizer.param_groups[0]["lr"]
        if config.muon:
            optimizer = Muon(model.named_parameters(), lr=rate)
        elif config.method == "scape":
            optimizer = AdamS(model.parameters(), lr=rate)
        replicas = parallel_dims.get_optional_mesh("dp_replicate")
        steps, norm = config.total_steps, config.max_norm
        container.optimizers = [
            replicate(model, optimizer, config.method, replicas, max_norm=norm, reduction="sum", total_steps=steps)
        ]
        if following is not None:
            following(container, model_parts, parallel_dims)

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("this state would lack that of the method; use ReplicaCheckpoints.Config for checkpoints")


class ReplicaCheckpoints(CheckpointManager):
    """Saves the state of every replica, and the weights that all replicas share."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_save(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
        (model,), (optimizer,) = self.states[MODEL].model, self.states[OPTIMIZER].optimizers
        if OPTIMIZER not in state_dict:
            with optimizer.shared_weights():
                return super().dcp_save(state_dict, *args, **options)
        return super().dcp_save(checkpoint_states(model, optimizer) | self._others(state_dict), *args, **options)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, **options: Any) -> None:
        if OPTIMIZER not in state_dict:
            return super().dcp_load(state_dict, checkpoint_id, **options)
        (model,), (optimizer,) = self.states[MODEL].model, self.states[OPTIMIZER].optimizers
        logger.info(load_checkpoint(checkpoint_id, model, optimizer))
        others = self._others(state_dict)
        dcp.load(others, checkpoint_id=checkpoint_id)
        for group, rate in zip(optimizer.param_groups, others["lr_scheduler"].schedulers[0].get_last_lr(), strict=True):
            group["lr"] = rate  # not part of the state of methods with an optimizer for each replica

    def _others(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: state for name, state in state_dict.items() if name in self.states and name != OPTIMIZER}


class ReplicaMetrics(MetricsProcessor):
    """Logs the norm of the synchronized gradient, and the bytes that a rank sent to other replicas."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, mean: float, most: float, norm: float, extra_metrics: Any = None) -> None:
        stats = self.optimizers.optimizers[0].stats()  # collective
        super().log(step, mean, most, stats["grad_norm"], (extra_metrics or {}) | stats)
        logger.info(f"sent {stats['sent_bytes']:.0f} of {stats['dense_bytes']:.0f} B/step and rank to other replicas")


class ReplicaTrainer(Trainer):
    """TorchTitan's trainer with replicas along `data_parallel_replicate_degree`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        config.optimizer.total_steps = config.training.steps
        config.optimizer.max_norm, config.training.max_norm = config.training.max_norm, math.inf
        config.parallelism.spmd_backend = "partial_dtensor"  # the backend with a mesh for FSDP2 alone
        spec = config.model_spec = copy.copy(config.model_spec)
        spec.parallelize_fn = partial(shard_only, spec.parallelize_fn)
        spec.post_optimizer_build_fn = partial(ReplicaOptimizers.synchronize, spec.post_optimizer_build_fn)
        super().__init__(config)


def shard_only(parallelize: Any, model: Any, *, parallel_dims: Any, **options: Any) -> Any:
    """Shard the model within a replica: a `ModelSpec.parallelize_fn`."""
    within = copy.copy(parallel_dims)
    within.dp_replicate = 1
    return parallelize(model, parallel_dims=within, **options)


def with_replicas(config: Trainer.Config) -> ReplicaTrainer.Config:
    """Return a configuration of TorchTitan's trainer with replicas."""

    def convert(component: type, old: Any, **changes: Any) -> Any:
        return component.Config(**{field.name: getattr(old, field.name) for field in fields(old)} | changes)

    return convert(
        ReplicaTrainer,
        config,
        optimizer=convert(ReplicaOptimizers, config.optimizer),
        checkpoint=convert(ReplicaCheckpoints, config.checkpoint),
        metrics=convert(ReplicaMetrics, config.metrics),
    )
