"""Train with TorchTitan 0.3.0's own trainer: FSDP2 shards within a node, `replicate` synchronizes between nodes.

    torchrun --nproc_per_node=4 -m scripts.examples.titan_debug --module scripts.examples.titan_debug \
        --config replicas --optimizer.method quantized_update --optimizer.kind muon

It needs an environment of its own, see docs/getting_started/own_loop.md. `with_replicas` converts a configuration of
TorchTitan's trainer that uses data parallelism, with `data_parallel_replicate_degree` replicas:

- FSDP2 gets the shard dimension of the mesh only. With both dimensions it would all-reduce the gradients itself.
- The optimizer is wrapped before the LR scheduler is built. TorchTitan divides the loss by the tokens of all ranks,
  hence `reduction="sum"`.
- `replicate` applies `training.max_norm`. TorchTitan clips before the step, when the replicas' gradients still differ.
- titan_checkpoints.py replaces the checkpoint manager, because the state of the replicas differs.
- Muon orthogonalizes the fused `wqkv` as one matrix: its rows are interleaved by KV head, and `split` is for contiguous
  blocks.
"""

import copy
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from scripts.examples.titan_checkpoints import ReplicaCheckpoints
from torchtitan_scape import AdamS, Muon, replicate


class ReplicaOptimizers(OptimizersContainer):
    """TorchTitan's optimizer of a model, or one of this project, inside `replicate`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        method: str = "dense"  # a name of the method registry
        kind: Literal["titan", "adams", "muon"] = "titan"  # the others use the learning rate of the first param group

    def __init__(self, config: Config, *, model_parts: list[Any]) -> None:
        super().__init__(config, model_parts=model_parts)
        self.method, self.kind = config.method, config.kind

    def synchronize(self, parallel_dims: Any, max_norm: float, steps: int) -> None:
        if len(self.optimizers) > 1:
            raise ValueError("replicate() takes one optimizer: use no pipeline parallelism, and one optimizer_name")
        (model,), (optimizer,) = self.model_parts, self.optimizers
        if self.kind != "titan":
            kind = {"adams": AdamS, "muon": Muon}[self.kind]
            optimizer = kind(model.named_parameters(), lr=optimizer.param_groups[0]["lr"])
        replicas = parallel_dims.get_optional_mesh("dp_replicate")
        self.optimizers: list[Any] = [
            replicate(model, optimizer, self.method, replicas, max_norm=max_norm, reduction="sum", total_steps=steps)
        ]

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("this state would lack that of the method; set checkpoint to ReplicaCheckpoints.Config")


class SynchronizedMetrics(MetricsProcessor):
    """Logs the norm of the synchronized gradient, and the bytes that a rank sends to other replicas."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, mean: float, most: float, norm: float, extra_metrics: Any = None) -> None:
        stats = self.optimizers.optimizers[0].stats()
        super().log(step, mean, most, stats["grad_norm"], (extra_metrics or {}) | stats)
        logger.info(f"sent {stats['sent_bytes']:.0f} B/step and rank, dense {stats['dense_bytes']:.0f} B")


class TitanTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        spec = config.model_spec = copy.copy(config.model_spec)
        parallelize, after_build = spec.parallelize_fn, spec.post_optimizer_build_fn
        max_norm, config.training.max_norm = config.training.max_norm, math.inf
        config.parallelism.spmd_backend = "partial_dtensor"  # FSDP2 on one dimension; the others annotate both

        def shard_within_replicas(model: Any, *, parallel_dims: Any, **options: Any) -> Any:
            within = copy.copy(parallel_dims)
            within.dp_replicate = 1
            return parallelize(model, parallel_dims=within, **options)

        def synchronize(optimizers: ReplicaOptimizers, model_parts: list[Any], parallel_dims: Any) -> None:
            optimizers.synchronize(parallel_dims, max_norm, config.training.steps)
            if after_build is not None:
                after_build(optimizers, model_parts, parallel_dims)

        spec.parallelize_fn, spec.post_optimizer_build_fn = shard_within_replicas, synchronize
        super().__init__(config)


def with_replicas(config: Trainer.Config) -> TitanTrainer.Config:
    """Return a configuration of TorchTitan's trainer with this module's classes."""

    def convert(component: Any, old: Any, **changes: Any) -> Any:
        return component.Config(**{field.name: getattr(old, field.name) for field in fields(old)} | changes)

    parts = {"optimizer": ReplicaOptimizers, "checkpoint": ReplicaCheckpoints, "metrics": SynchronizedMetrics}
    return convert(TitanTrainer, config, **{key: convert(kind, getattr(config, key)) for key, kind in parts.items()})
