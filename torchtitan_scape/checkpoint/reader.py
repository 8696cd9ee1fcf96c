"""Saving the state of optimizer and method with DCP, and reading it into the same layout or another one.

Tensors have the parameters' names and global shapes, so that every shard degree can read them. State that differs
between replicas has a leading dimension with one row per replica: as a plain tensor, DCP would take the replicas'
values for copies of one tensor and keep a single one. The record of a checkpoint describes its kinds of state, see
`methods.interface.State`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_scape.checkpoint.failures import failure_text
from torchtitan_scape.checkpoint.global_layout import GlobalLayout, own_storage
from torchtitan_scape.checkpoint.param_groups import PREFIX, group_values
from torchtitan_scape.checkpoint.record_format import stored_kind
from torchtitan_scape.checkpoint.safe_load import CheckedReader, SafePlanner
from torchtitan_scape.checkpoint.slices import FlatSlices
from torchtitan_scape.checkpoint.state import (
    dense_state,
    has_dense_state,
    needs_second_moment,
    saved_weights,
    shard_key,
    states,
    stores,
)
from torchtitan_scape.core.parameters import Shard as LocalShard
from torchtitan_scape.core.parameters import local
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.matrix_choice import other_choice
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.registry import FIRST, OPTIMIZERS, SECOND
from torchtitan_scape.replica.checks import check_states
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.setup_checks import raise_on_all_ranks

# First part of the names of weights that are stored besides their masters.
_WEIGHTS = "weights"
# Bytes that a rank reads at a time.
_AT_A_TIME = 1 << 29


class OptimizerCheckpoint(Stateful):
    """State of the optimizer and the method for `dcp.save`. `checkpoint.migration.migrate` loads it.

    Args:
        residual: "exact", "mean" or "drop", as in `[checkpoint] residual`.
    """

    def __init__(self, optimizers: ReplicaOptimizer, layout: GlobalLayout, residual: str) -> None:
        self._optimizers, self._layout, self._residual = optimizers, layout, residual

    def state_dict(self) -> dict[str, Any]:
        self._optimizers.finish_previous_step()
        parameters = {shard.name: shard.parameter for shard in self._optimizers.shards()}
        dense = dense_state(self._optimizers)
        saved = states(self._optimizers, self._residual)
        check_states(self._optimizers, saved, dense, self._optimizers.attempted_steps)
        found = self._layout.of_optimizer(dense, parameters)
        if not has_dense_state(self._optimizers):  # else they are part of it
            found |= group_values(self._optimizers.param_groups, self._optimizers.shards())
        for name, (parameter, bits) in saved_weights(self._optimizers).items():
            found[f"{_WEIGHTS}.{name}"] = self._layout.whole(parameter, own_storage(bits))
        total = self._layout.replicas * self._layout.simulated
        for state in saved:
            for name, values in state.tensors.items():
                if state.packed:
                    values = state.entries(name, local(parameters[name]).shape)
                values, key = own_storage(values), f"{state.kind}.{name}"
                if not state.by_parameter:
                    found[shard_key(self._optimizers, key)] = values
                elif state.per_replica:
                    found[key] = self._layout.rows(parameters[name], values, total)
                elif state.starts is not None:
                    found[key] = self._layout.part(parameters[name], values, state.starts[name])
                else:
                    found[key] = self._layout.whole(parameters[name], values)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("it is loaded by checkpoint.migration.migrate")


class StateReader:
    """A checkpoint's optimizer state, read in batches of parameters. All calls are collective.

    Args:
        saved: the record of the run that saved, see `checkpoint.metadata`.
        prefix: of the names of the model's tensors in the checkpoint.

    Attributes:
        replicas: number of replicas of the run that saved.
        same_count: whether this run has as many.

    Raises:
        ValueError: Muon updated other matrices in the run that saved. Raised on every rank.
    """

    def __init__(
        self,
        path: str,
        saved: dict[str, Any],
        optimizers: ReplicaOptimizer,
        layout: GlobalLayout,
        prefix: str = "",
    ) -> None:
        self.path, self.saved, self.layout, self._prefix = path, saved, layout, prefix
        self._optimizers, self._shards = optimizers, optimizers.shards()
        self._kinds = CheckedReader(path).read_metadata().state_dict_metadata
        self.replicas: int = saved["replicas"]
        self.simulated = layout.simulated
        self.model_rank, self.model_ranks = optimizers.collectives.model_rank, optimizers.collectives.model_ranks
        self.same_count = self.replicas == layout.replicas * layout.simulated
        raise_on_all_ranks(optimizers.collectives, self._other_choice())

    def __iter__(self) -> Iterator[tuple[int, LocalShard, dict[str, Tensor]]]:
        """Yield each parameter with its number and its saved tensors by kind, on the CPU.

        Tensors are flat (n,), or (rows, n) for the replicas whose rows this rank reads if the kind is saved per
        replica. "exp_avg" is a dense optimizer's first moment, "exp_avg_sq" its second, if this run needs it.
        """
        self._check_parameters()
        number, batches = 0, list(self._batches())
        # Pipeline stages have different numbers of batches, and reading is collective.
        most = max(self._optimizers.collectives.gather_objects(len(batches)))
        for shards in [*batches, *([] for _ in range(most - len(batches)))]:
            for kinds, shard in zip(self._read(shards), shards, strict=True):
                yield number, shard, kinds
                number += 1

    def mean(self, own: Tensor) -> Tensor:
        """Return the mean (n,) over the replicas that saved, from the rows (r, n) that each rank has read."""
        total = own.sum(0)
        if self.layout.simulated == 1:
            self._optimizers.collectives.sum_over_replicas(total)
        return total.div_(self.replicas)

    def fill(self, keys: dict[str, Tensor]) -> None:
        """Read into the tensors, by their names in the optimizer's part of the checkpoint."""
        loaded = self.layout.of_optimizer(keys, {shard.name: shard.parameter for shard in self._shards})
        load_into(self.path, {"optimizer": loaded})
        keys.update({key: value for key, value in loaded.items() if not isinstance(value, FlatSlices)})

    def group_values(self) -> dict[str, Any]:
        """Return the saved values of param groups, by their names in the optimizer's part of the checkpoint."""
        found: dict[str, Any] = {}
        for name, stored in self._kinds.items():
            if name.startswith(f"optimizer.{PREFIX}"):
                of_tensor = isinstance(stored, TensorStorageMetadata)
                value = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu") if of_tensor else None
                found[name.removeprefix("optimizer.")] = value
        if found:
            load_into(self.path, {"optimizer": found})
        return found

    def fill_weights(self) -> None:
        """Read the weights that masters do not determine, if this run has such weights and they were saved."""
        saved = saved_weights(self._optimizers)
        keys = {f"{_WEIGHTS}.{name}": self.layout.whole(parameter, bits) for name, (parameter, bits) in saved.items()}
        if keys and all(self.has(key) for key in keys):
            load_into(self.path, {"optimizer": keys})
            self._optimizers.sharding.version.changed()

    def model(self, shard: LocalShard) -> Tensor:
        """Return the parameter's saved value, FP32 (n,). Not collective: pipeline stages have different parameters."""
        room = torch.empty(local(shard.parameter).shape, dtype=torch.float32, device="cpu")
        load_into(self.path, {self._prefix + shard.name: self.layout.whole(shard.parameter, room)}, alone=True)
        return room.view(-1)

    def fill_of_this_shard(self, states: Sequence[State]) -> bool:
        """Read the tensors that belong to this shard alone, if they were saved. Return whether none is missing."""
        of_shard = [state for state in states if not state.by_parameter]
        if not of_shard:
            return True
        named = [
            (state, shard_key(self._optimizers, f"{stored_kind(state.kind, self.saved)}.{name}"), values)
            for state in of_shard
            for name, values in state.tensors.items()
        ]
        self.fill({key: values for _, key, values in named if self.has(key)})
        absent = [(state, values) for state, key, values in named if not self.has(key)]
        for state, values in absent:
            if state.if_absent is not None:
                values.fill_(state.if_absent)
        return all(state.if_absent is not None for state, _ in absent)

    def mean_of_this_run(self, own: Tensor) -> Tensor:
        """Return the mean (n,) over this run's replicas, from the rows (r, n) of those in this process."""
        mean = own.mean(0)
        self._optimizers.collectives.sum_over_replicas(mean)
        return mean.div_(self._optimizers.collectives.replicas)

    def broadcast_if_replica_counts_differ(self, values: Tensor) -> None:
        """Broadcast `values` from the first replica if replica counts differ, as some ranks may have read no rows."""
        if not self.same_count and self.layout.simulated == 1:
            self._optimizers.collectives.broadcast_from_first([values])

    @property
    def has_dense_state(self) -> bool:
        """Whether a dense optimizer's state was saved."""
        in_format_1 = self.has(f"state.{self._shards[0].name}.step")
        return bool(self.saved.get("dense_state", in_format_1))

    def applied_steps(self) -> float:
        """Return the steps that the saved optimizer's bias correction has counted; 0 if it counts none."""
        if "applied_steps" in self.saved:
            return float(self.saved["applied_steps"])
        key = f"state.{self._shards[0].name}.step"
        if not self.has(key):
            return 0.0
        stored = cast(TensorStorageMetadata, self._kinds[f"optimizer.{key}"])
        steps = torch.zeros(stored.size, dtype=stored.properties.dtype, device="cpu")
        self.fill({key: steps})
        return float(steps)

    def has(self, key: str) -> bool:
        """Return whether the optimizer's part of the checkpoint contains this name."""
        return f"optimizer.{key}" in self._kinds

    def shape(self, key: str) -> torch.Size | None:
        """Return the shape of a tensor in the optimizer's part of the checkpoint; None if it has none."""
        stored = self._kinds.get(f"optimizer.{key}")
        return stored.size if isinstance(stored, TensorStorageMetadata) else None

    def shapes_by_shard(self, prefix: str) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shapes of saved tensors of single shards whose names begin with `prefix`, by name and shard."""
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, stored in self._kinds.items():
            name, _, number = key.removeprefix("optimizer.").rpartition(".")
            if name.startswith(prefix):
                found.setdefault(name, {})[number] = tuple(cast(TensorStorageMetadata, stored).size)
        return found

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on all ranks. Collective."""
        return all(self._optimizers.collectives.gather_objects(value))

    def _moments(self) -> tuple[str, ...]:
        """Return the moments of a dense optimizer that this run reads by parameter."""
        kinds = (FIRST, SECOND) if needs_second_moment(self._optimizers, self.saved["optimizer"]) else (FIRST,)
        same_class = self.saved["optimizer"] == type(self._optimizers.inner).__name__
        further = stores(self._optimizers)[0].moments if same_class and stores(self._optimizers) else ()
        return (*kinds, *(kind for kind in further if kind not in kinds))

    def _other_choice(self) -> str:
        """Return an error if Muon, in both runs, updated other parameters in the run that saved; else ""."""
        inner = self._optimizers.inner
        if not isinstance(inner, Muon) or self.saved["optimizer"] != "Muon":
            return ""

        def has_moment(shard: LocalShard, kind: str) -> bool:
            return self.has(f"state.{shard.name}.{kind}") or self.has(f"{stored_kind(kind, self.saved)}.{shard.name}")

        saved = [(shard, has_moment(shard, SECOND)) for shard in self._shards if has_moment(shard, FIRST)]
        error = other_choice(inner.updates, saved)
        return f"{self.path} {error}" if error else ""

    def _check_parameters(self) -> None:
        """Raise ValueError on every rank if a parameter has no saved state. Collective."""
        entry = OPTIMIZERS.get(self.saved["optimizer"])
        kinds = [stored_kind(kind, self.saved) for kind, what in self.saved["states"].items() if what["by_parameter"]]
        error = ""
        for shard in self._shards:
            keys = [f"{kind}.{shard.name}" for kind in kinds] + [f"state.{shard.name}.{m}" for m in self._moments()]
            if (
                not error
                and entry is not None
                and entry.moments(self._optimizers.inner, shard)
                and not any(map(self.has, keys))
            ):
                error = f"{self.path} has no state of the parameter {shard.name!r}: it is of another model"
        raise_on_all_ranks(self._optimizers.collectives, error)

    def _read(self, shards: Sequence[LocalShard]) -> list[dict[str, Tensor]]:
        moments = self._moments()
        buffers: list[dict[str, Tensor]] = []
        keys: dict[str, Tensor] = {}
        for shard in shards:
            buffer: dict[str, Tensor] = {}
            for kind, description in self.saved["states"].items():
                key = f"{stored_kind(kind, self.saved)}.{shard.name}"
                if not description["by_parameter"] or not self.has(key):
                    continue
                rows = (self.layout.share(self.replicas),) if description["per_replica"] else ()
                stored = cast(TensorStorageMetadata, self._kinds[f"optimizer.{key}"])
                buffer[kind] = torch.empty((*rows, *shard.local_shape), dtype=stored.properties.dtype, device="cpu")
                target = self.layout.rows(shard.parameter, buffer[kind], self.replicas) if rows else None
                keys[key] = self.layout.whole(shard.parameter, buffer[kind]) if target is None else target
            for kind in moments:
                if self.has(moment := f"state.{shard.name}.{kind}"):
                    buffer[kind] = torch.empty(shard.local_shape, dtype=torch.float32, device="cpu")
                    keys[moment] = self.layout.whole(shard.parameter, buffer[kind])
            buffers.append(buffer)
        self.fill(keys)
        own = {kind for kind, description in self.saved["states"].items() if description["per_replica"]}
        return [
            {kind: t.view(len(t), shard.size) if kind in own else t.view(-1) for kind, t in buffer.items()}
            for shard, buffer in zip(shards, buffers, strict=True)
        ]

    def _batches(self) -> Iterator[list[LocalShard]]:
        """Yield batches of parameters with about `_AT_A_TIME` bytes to read, the same on all ranks of a stage."""
        rows = self.layout.share_at_most(self.replicas)
        batch: list[LocalShard] = []
        taken = 0
        for shard in self._shards:
            batch.append(shard)
            taken += shard.entries // self.layout.ways * 4 * (rows + 3)
            if taken >= _AT_A_TIME:
                yield batch
                batch, taken = [], 0
        if batch:
            yield batch


def load_into(path: str, state: dict[str, Any], alone: bool = False) -> None:
    """Read the entries of `state` from a checkpoint, in place. Collective, unless this rank reads `alone`.

    Raises:
        ValueError: an entry is missing or has another shape, or the checkpoint cannot be read.
    """
    try:
        dcp.load(state, storage_reader=CheckedReader(path), planner=SafePlanner(), no_dist=alone)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if "Missing key" in str(cause) or "ize mismatch" in str(cause):
                raise ValueError(f"{path} is of another model or method: {' '.join(str(cause).split())}") from None
        if all(isinstance(cause, (ValueError, OSError)) for cause in causes):
            raise ValueError(failure_text(error, path, reading=True)) from None
        CheckedReader(path).read_metadata()  # Raises the reason if it is in `.metadata`; DCP replaces it.
        raise
