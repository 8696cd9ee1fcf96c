"""The record of a run in its checkpoints, and its differences to another run."""

import json
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_scape.checkpoint.record_format import FORMAT
from torchtitan_scape.checkpoint.state import describe_states, has_dense_state, record
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

RUN_METADATA = "run_metadata"
# With another value of these, state is loaded by the rule for another layout; so it is with some options of a method.
_LAYOUT = {"replicas", "shard", "context", "tensor", "pipeline", "levels_weights", "levels_block"}


class RunMetadata(Stateful):
    """Layout, method and options of a run, and its counters at the time of the save.

    Args:
        optimizer: it is asked for its counters at every save.
        residual: "exact", "mean" or "drop".
        facts: of the run, by name, JSON values; at least "model".

    Attributes:
        sent: bytes that a rank has sent until now, by level; None if unknown. The trainer sets it before every save.
    """

    sent: dict[str, float] | None = None

    def __init__(self, optimizer: ReplicaOptimizer, residual: str, facts: dict[str, Any]) -> None:
        self._optimizer, options, collectives = optimizer, optimizer.options, optimizer.collectives
        self.values: dict[str, Any] = {
            "format": FORMAT,
            "replicas": collectives.replicas,
            "shard": collectives.model_ranks,
            "method": options.method_name(),
            "optimizer": type(optimizer.inner).__name__,
            "dense_state": has_dense_state(optimizer),
            "betas": list(optimizer.param_groups[0].get("betas", ())),
            "residual": residual,
            "states": describe_states(optimizer, residual),
            **options.fingerprint(),
            **facts,
        }
        self._layout = {*_LAYOUT & self.values.keys(), *options.layout()}
        self._kinds = set(describe_states(optimizer, "exact"))

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.values | record(self._optimizer) | {"bytes_sent": self.sent})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing: `folder.read_record` reads the record before anything else is loaded."""

    def compare(self, saved: dict[str, Any], path: str) -> tuple[bool, dict[str, str]]:
        """Compare this run with the one that saved.

        Returns:
            (whether the state can be loaded as it was saved, all differences as key: "saved -> here").

        Raises:
            ValueError: the checkpoint is of another model.
        """
        if saved["model"] != self.values["model"]:
            raise ValueError(
                f"{path} holds the model {saved['model']!r}, this run has {self.values['model']!r}; build the model "
                "of the checkpoint, or start in another folder (--job.dump_folder of the trainer)"
            )
        # Values of older versions.
        older: dict[str, float] = {"levels_weights": 0, "levels_block": 0, "pipeline": 1, "whiten_every": 0}
        if saved["method"] == self.values["method"]:
            older |= {"interval": 1, "decay": 0.0}
        saved = older | saved
        keys = [
            key
            for key in self.values | saved
            if key in self.values and key in saved and key not in ("format", "dense_state", "residual", "states")
        ]
        different = {key: f"{saved[key]!r} -> {self.values[key]!r}" for key in keys if saved[key] != self.values[key]}
        other = saved["method"] != self.values["method"] or saved["optimizer"] != self.values["optimizer"]
        laid_out = {key for key in self._layout if saved.get(key) != self.values[key]}
        # If the code determines the layout of states (SCAPE), quantization errors belong to the entries of a payload,
        # which are others at another density.
        coded = {saved.get("code"), self.values.get("code")} - {None, "float32"}
        if "density" in different and "code" in self._layout and coded:
            laid_out.add("density")
        # An owner's error that this run has no state for must be subtracted from the weights.
        states = saved.get("states", {}).items()
        unknown = {k for k, s in states if s["on_migration"] == "displacement" and k not in self._kinds}
        return not (other or laid_out or unknown), different
