"""The record of a run in its checkpoints, and its differences to another run."""

import json
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_scape.checkpoint.safe_load import load_into
from torchtitan_scape.checkpoint.state import describe_states, has_dense_state, record
from torchtitan_scape.core.files import parse_json
from torchtitan_scape.core.renamed_keys import removed_keys, with_present_keys
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

RUN_METADATA = "run_metadata"
# With another value of these, state is loaded by the rule for another layout; so it is with some options of a method.
_LAYOUT = {"replicas", "shard", "context", "tensor", "pipeline", "levels_weights", "levels_block"}
FORMAT = 3
_READS_EARLIER = "937dd8d0"  # the last commit that reads formats 1 and 2; it writes format 3
# Types of values that every record has.
_TYPES: dict[str, type] = {"method": str, "optimizer": str, "residual": str, "replicas": int, "shard": int}
_TYPES |= {"states": dict, "counters": dict}


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
        """Load nothing: `read_record` reads the record before anything else is loaded."""

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
        keys = [
            key
            for key in self.values | saved
            if key in self.values and key in saved and key not in ("format", "dense_state", "residual", "states")
        ]
        different = {key: f"{saved[key]!r} -> {self.values[key]!r}" for key in keys if saved[key] != self.values[key]}
        other = saved["method"] != self.values["method"] or saved["optimizer"] != self.values["optimizer"]
        laid_out = {key for key in self._layout if saved.get(key) != self.values[key]}
        removed = removed_keys(saved, f"sync.{saved['method']}")
        laid_out |= removed
        different |= {key: f"{saved[key]!r} -> removed" for key in removed}
        # If the code determines the layout of states (SCAPE), quantization errors belong to the entries of a payload,
        # which are others at another density.
        coded = {saved.get("code"), self.values.get("code")} - {None, "float32"}
        if "density" in different and "code" in self._layout and coded:
            laid_out.add("density")
        # An owner's error that this run has no state for must be subtracted from the weights.
        states = saved.get("states", {}).items()
        unknown = {k for k, s in states if s["on_migration"] == "displacement" and k not in self._kinds}
        return not (other or laid_out or unknown), different


# ---------------------------------------------------------------------------------------------------- reading


def read_record(path: str) -> dict[str, Any]:
    """Return the record of the run that saved. Collective.

    Raises:
        ValueError: it cannot be read, is damaged, or is of another format.
    """
    state: dict[str, Any] = {RUN_METADATA: {"json": ""}}
    load_into(path, state)
    return parse_record(state[RUN_METADATA]["json"], path)


class _Record(dict[str, Any]):
    """A record whose missing keys raise ValueError with the checkpoint's path."""

    def __init__(self, values: dict[str, Any], path: str) -> None:
        super().__init__({k: _Record(v, path) if isinstance(v, dict) else v for k, v in values.items()})
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise damaged(self._path, f"it has no {key!r}")


def damaged(path: str, reason: str) -> ValueError:
    """Return the error for a record of the checkpoint `path` that cannot be interpreted."""
    return ValueError(f"{path}: the record of the run, run_metadata.json, is damaged: {reason}")


def parse_record(content: Any, path: str) -> dict[str, Any]:
    """Return the record in JSON text, with the present keys of options (`core.renamed_keys`).

    Raises:
        ValueError: the record is damaged, or of another format. Missing keys raise it when they are read.
    """
    try:
        values = parse_json(content)
    except (ValueError, TypeError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(values, dict):
        raise damaged(path, f"it is {values!r:.100}")
    try:
        saved = _Record(_with_present_keys(_Record(values, path), path), path)
    except (TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None
    for key, kind in _TYPES.items():
        if type(saved[key]) is not (_Record if kind is dict else kind) or (kind is int and saved[key] < 1):
            raise damaged(path, f"{key!r} is {saved[key]!r:.100}")
    for table, kind in (("states", _Record), ("counters", int)):
        for key, value in saved[table].items():
            if type(value) is not kind:
                raise damaged(path, f"{key!r} of {table!r} is {value!r:.100}")
    if type(saved.get("code")) not in (str, type(None)):
        raise damaged(path, f"'code' is {saved['code']!r:.100}")
    if saved["method"] not in METHODS:
        raise damaged(path, f"there is no method {saved['method']!r:.100}")
    return saved


def _with_present_keys(saved: dict[str, Any], path: str) -> dict[str, Any]:
    version = saved.get("format", 1)
    if version != FORMAT:
        earlier = f"commit {_READS_EARLIER} reads formats 1 and 2: save with it once more" if version in (1, 2) else ""
        raise ValueError(
            f"{path} has format {version!r}, and this version reads format {FORMAT}; "
            f"{earlier or 'resume with the version that saved it'}, or start from its model alone "
            "(--checkpoint.initial_load_path of the trainer)"
        )
    record = with_present_keys(saved, f"sync.{saved['method']}")
    if "sharding" in record:
        record["sharding"] = with_present_keys(record["sharding"], "sharding")
    return record
