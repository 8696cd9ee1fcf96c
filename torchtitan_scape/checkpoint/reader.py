"""Reading a checkpoint's optimizer state, parameter by parameter, into any layout."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_scape.checkpoint.global_layout import FlatSlices, GlobalLayout, slices_of
from torchtitan_scape.checkpoint.safe_load import CheckedReader, load_into
from torchtitan_scape.checkpoint.state import PREFIX, WEIGHTS, saved_weights, stores
from torchtitan_scape.core.parameters import Shard, local
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.matrix_choice import other_choice
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.registry import FIRST, SECOND
from torchtitan_scape.replica.checks import raise_on_all_ranks
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

_AT_A_TIME = 1 << 29  # bytes that a rank reads at a time


class StateReader:
    """A checkpoint's optimizer state, read in batches of parameters. All calls are collective.

    Args:
        saved: the record of the run that saved, see `checkpoint.metadata`.
        prefix: of the names of the model's tensors in the checkpoint.

    Attributes:
        replicas: number of replicas of the run that saved.
        same_count: whether this run has as many.
        same_class: whether that run had an optimizer of the same class.
        has_dense_state: whether that run saved a dense optimizer's state.

    Raises:
        ValueError: Muon updated other matrices in the run that saved. Raised on every rank.
    """

    def __init__(
        self, path: str, saved: dict[str, Any], optimizer: ReplicaOptimizer, layout: GlobalLayout, prefix: str = ""
    ) -> None:
        self.path, self.saved, self.layout, self._prefix = path, saved, layout, prefix
        self._optimizer, self._shards, self._collectives = optimizer, optimizer.shards(), optimizer.collectives
        self._slices = slices_of(self._shards)
        self._entries = {
            name.removeprefix("optimizer."): entry
            for name, entry in CheckedReader(path).read_metadata().state_dict_metadata.items()
            if name.startswith("optimizer.")
        }
        self.replicas: int = saved["replicas"]
        self.simulated = layout.simulated
        self.model_rank, self.model_ranks = self._collectives.model_rank, self._collectives.model_ranks
        self.same_count = self.replicas == layout.replicas * layout.simulated
        self.same_class: bool = saved["optimizer"] == type(optimizer.inner).__name__
        self.has_dense_state: bool = saved["dense_state"]
        self._kinds = [kind for kind, described in saved["states"].items() if described["by_parameter"]]
        self._moments = self._moments_to_read()
        if isinstance(optimizer.inner, Muon) and self.same_class:
            raise_on_all_ranks(self._collectives, self._other_choice(optimizer.inner))

    # -------------------------------------------------------------------------------------- by parameter

    def __iter__(self) -> Iterator[tuple[Shard, dict[str, Tensor]]]:
        """Yield each parameter with its saved tensors by kind, on the CPU.

        Tensors are flat (n,), or (rows, n) for the replicas whose rows this rank reads if the kind is saved per
        replica. "exp_avg" is a dense optimizer's first moment, "exp_avg_sq" its second, if this run needs it.
        """
        batches = list(self._batches())
        # Pipeline stages have different numbers of batches, and reading is collective.
        most = max(self._collectives.gather_objects(len(batches)))
        for shards in [*batches, *([] for _ in range(most - len(batches)))]:
            yield from zip(shards, self._read(shards), strict=True)

    def _batches(self) -> Iterator[list[Shard]]:
        """Yield batches of parameters with about `_AT_A_TIME` bytes to read, the same on all ranks of a stage."""
        rows = self.layout.share_at_most(self.replicas)
        batch: list[Shard] = []
        taken = 0
        for shard in self._shards:
            batch.append(shard)
            taken += shard.entries // self.layout.ways * 4 * (rows + 3)
            if taken >= _AT_A_TIME:
                yield batch
                batch, taken = [], 0
        if batch:
            yield batch

    def _read(self, shards: Sequence[Shard]) -> list[dict[str, Tensor]]:
        by_parameter: list[dict[str, Tensor]] = []
        keys: dict[str, Tensor] = {}
        for shard in shards:
            kinds, shape = dict[str, Tensor](), shard.local_shape
            for kind in self._kinds:
                if self.has(key := f"{kind}.{shard.name}"):
                    rows = (self.layout.share(self.replicas),) if self.saved["states"][kind]["per_replica"] else ()
                    dtype = cast(TensorStorageMetadata, self._entries[key]).properties.dtype
                    target = torch.empty((*rows, *shape), dtype=dtype, device="cpu")
                    keys[key] = (
                        self.layout.rows(shard.parameter, target, self.replicas)
                        if rows
                        else self.layout.whole(shard.parameter, target)
                    )
                    kinds[kind] = target.view(*rows, shape.numel())
            for kind in self._moments:
                if self.has(key := f"state.{shard.name}.{kind}"):
                    target = torch.empty(shape, dtype=torch.float32, device="cpu")
                    keys[key] = self.layout.whole(shard.parameter, target)
                    kinds[kind] = target.view(-1)
            by_parameter.append(kinds)
        self.fill(keys)
        return by_parameter

    def _moments_to_read(self) -> tuple[str, ...]:
        """Return the moments of a dense optimizer that this run reads by parameter."""
        each = stores(self._optimizer)
        # Otherwise the method has them, or they are loaded as they were saved.
        by_parameter = each or not (self.same_class or self._optimizer.options.holds_optimizer_state)
        kinds = (FIRST, SECOND) if by_parameter else (FIRST,)
        further = each[0].moments if self.same_class and each else ()
        return (*kinds, *(kind for kind in further if kind not in kinds))

    def _other_choice(self, muon: Muon) -> str:
        """Return an error if Muon updated other parameters in the run that saved; else ""."""

        def has_moment(shard: Shard, kind: str) -> bool:
            return self.has(f"state.{shard.name}.{kind}") or self.has(f"{kind}.{shard.name}")

        saved = [(shard, has_moment(shard, SECOND)) for shard in self._shards if has_moment(shard, FIRST)]
        error = other_choice(muon.updates, saved)
        return f"{self.path} {error}" if error else ""

    # ------------------------------------------------------------------------------------------ by name

    def has(self, key: str) -> bool:
        """Return whether the optimizer's part of the checkpoint contains this name."""
        return key in self._entries

    def shape(self, key: str) -> torch.Size | None:
        """Return the shape of a tensor in the optimizer's part of the checkpoint; None if it has none."""
        entry = self._entries.get(key)
        return entry.size if isinstance(entry, TensorStorageMetadata) else None

    def shapes_by_shard(self, prefix: str) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shapes of saved tensors of single shards whose names begin with `prefix`, by name and shard."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, entry in self._entries.items():
            name, _, number = key.rpartition(".")
            if name.startswith(prefix):
                shapes.setdefault(name, {})[number] = tuple(cast(TensorStorageMetadata, entry).size)
        return shapes

    def fill(self, keys: dict[str, Tensor]) -> None:
        """Read into the tensors, by their names in the optimizer's part of the checkpoint."""
        loaded = self.layout.of_optimizer(keys, self._slices)
        load_into(self.path, {"optimizer": loaded})
        keys.update({key: value for key, value in loaded.items() if not isinstance(value, FlatSlices)})

    def fill_of_this_shard(self, states: Sequence[State]) -> bool:
        """Read the tensors that belong to this shard alone, if they were saved. Return whether none is missing."""
        of_shard = [state for state in states if not state.by_parameter]
        named = {f"{s.kind}.{name}.{self.model_rank}": values for s in of_shard for name, values in s.tensors.items()}
        present = {key: values for key, values in named.items() if self.has(key)}
        if named:
            self.fill(present)
        return len(present) == len(named)

    def fill_weights(self) -> None:
        """Read the weights that masters do not determine, if this run has such weights and they were saved."""
        saved = saved_weights(self._optimizer)
        keys = {f"{WEIGHTS}.{name}": self.layout.whole(parameter, bits) for name, (parameter, bits) in saved.items()}
        if keys and all(self.has(key) for key in keys):
            load_into(self.path, {"optimizer": keys})
            self._optimizer.sharding.version.changed()

    def group_values(self) -> dict[str, Any]:
        """Return the saved values of param groups, by their names in the optimizer's part of the checkpoint."""
        values: dict[str, Any] = dict.fromkeys(name for name in self._entries if name.startswith(PREFIX))
        if values:
            load_into(self.path, {"optimizer": values})
        return values

    def model(self, shard: Shard) -> Tensor:
        """Return the parameter's saved value, FP32 (n,). Not collective: pipeline stages have different parameters."""
        room = torch.empty(local(shard.parameter).shape, dtype=torch.float32, device="cpu")
        load_into(self.path, {self._prefix + shard.name: self.layout.whole(shard.parameter, room)}, alone=True)
        return room.view(-1)

    def applied_steps(self) -> float:
        """Return the steps that the saved optimizer's bias correction has counted; 0 if it counts none."""
        if "applied_steps" in self.saved:
            return float(self.saved["applied_steps"])
        key = f"state.{self._shards[0].name}.step"
        if not self.has(key):
            return 0.0
        entry = cast(TensorStorageMetadata, self._entries[key])
        steps = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
        self.fill({key: steps})
        return float(steps)

    # ------------------------------------------------------------------------------------ over replicas

    def mean(self, own: Tensor) -> Tensor:
        """Return the mean (n,) over the replicas that saved, from the rows (r, n) that each rank has read."""
        total = own.sum(0)
        if self.simulated == 1:
            self._collectives.sum_over_replicas(total)
        return total.div_(self.replicas)

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on all ranks. Collective."""
        return all(self._collectives.gather_objects(value))
