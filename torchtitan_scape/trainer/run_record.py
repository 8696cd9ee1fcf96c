"""The record of a trainer's run for its checkpoints."""

from dataclasses import asdict

from torchtitan_scape.checkpoint.metadata import RunMetadata
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.trainer.optimizers import schedule_text


def run_record(layout: Layout, config: JobConfig, optimizer: ReplicaOptimizer) -> RunMetadata:
    """Return the record that the checkpoints of a run contain."""
    simulated, levels = config.topology.simulate_replicas, config.sharding.levels
    facts = {
        "ranks": layout.world_size,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "context": layout.context,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "simulate_replicas": simulated,
        "replicas": layout.replicate * simulated,
        "model": config.model.title,
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "betas": [config.optimizer.beta1, config.optimizer.beta2],
        "eps": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
        "schedule": schedule_text(config),
        "border": config.data.border,
        "sharding": asdict(config.sharding),
        # Levels over which weights, masters and states are sharded; 0 without three-level partitioning.
        "levels_weights": levels.weights,
        "levels_block": config.sharding.cut_block if levels.active else 0,
        # These determine the ranks of each replica.
        "exchange": config.topology.exchange,
        "ranks_per_node": layout.ranks_per_node,
    }
    return RunMetadata(optimizer, config.checkpoint.residual, facts)
