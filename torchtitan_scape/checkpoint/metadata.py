"""What a checkpoint says of the run that saved it, and how this run differs."""

import json
from dataclasses import asdict
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from topology.layout import Layout
from torchtitan_scape.checkpoint.state import describe_states, record
from torchtitan_scape.config.job_config import JobConfig, options_of
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

RUN_METADATA = "run_metadata"
# With another value of these the state is taken by the rule for another layout; so it is with some options of a method.
_LAYOUT = ("replicas", "shard", "context", "tensor", "levels_weights", "levels_block")
# Options that a checkpoint may have by their earlier names.
_WAS = {"wire_dtype": "wire", "values_dtype": "values"}


class RunMetadata(Stateful):
    """Layout, method and options of a run, and counters at the time of the save.

    optimizers: asked for their counters at every save.
    """

    def __init__(self, layout: Layout, config: JobConfig, residual: str, optimizers: ReplicaOptimizer) -> None:
        optimizer, options = config.optimizer, options_of(config.sync)
        simulated, levels = config.topology.simulate_replicas, config.sharding.levels
        self._optimizers = optimizers
        self._layout = {*_LAYOUT, *options.layout()}
        self.values: dict[str, Any] = {
            "ranks": layout.world_size,
            "replicate": layout.replicate,
            "shard": layout.shard,
            "context": layout.context,
            "tensor": layout.tensor,
            "simulate_replicas": simulated,
            "replicas": layout.replicate * simulated,
            "model": f"{config.model.name} {config.model.flavor}",
            "method": config.sync.method,
            "optimizer": optimizer.name,
            "lr": optimizer.lr,
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "residual": residual,
            "border": config.data.border,
            "states": describe_states(optimizers, residual),
            **options.fingerprint(),
            "sharding": asdict(config.sharding),
            # Where weights, masters and states lie on three levels; 0 for none.
            "levels_weights": levels.weights,
            "levels_block": config.sharding.cut_block if levels.active else 0,
            # Who is which replica follows from these.
            "exchange": config.topology.exchange,
            "ranks_per_node": layout.ranks_per_node,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.values | record(self._optimizers))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take back: whoever loads has read it before."""

    def compare(self, saved: dict[str, Any], path: str) -> tuple[bool, dict[str, str]]:
        """(whether the state can be taken as it lies, every difference as key: "saved -> here").

        Raises ValueError for another model.
        """
        if saved["model"] != self.values["model"]:
            raise ValueError(
                f"{path} holds the model {saved['model']!r}, this run has {self.values['model']!r}; start it in "
                "another --job.dump_folder, or with the model of the checkpoint"
            )
        saved = {"levels_weights": 0, "levels_block": 0} | {_WAS.get(key, key): value for key, value in saved.items()}
        keys = [
            key
            for key in self.values | saved
            if key in self.values and key in saved and key not in ("residual", "states")
        ]
        different = {key: f"{saved[key]!r} -> {self.values[key]!r}" for key in keys if saved[key] != self.values[key]}
        other = saved["method"] != self.values["method"] or saved["optimizer"] != self.values["optimizer"]
        laid_out = {key for key in self._layout if saved.get(key) != self.values[key]}
        # What coding lost is kept for the entries of a payload, which are others at another density.
        if "density" in different and {saved.get("wire"), self.values.get("wire")} - {None, "float32"}:
            laid_out.add("density")
        return not other and not laid_out, different
