"""Loading a checkpoint's optimizer state into a run of any method and layout.

A load has three steps. `metadata.read_record` reads the record of the run that saved. `StateReader` reads the
tensors of each parameter, which `import_state` of the saving method maps to an `ImportedState`. The receiver of each
replica takes it: a `_Receiver`, or for a method that stores the moments the result of `Method.begin_import`.

The rule:

- Pending updates, which some replica has not applied yet, are never lost. With as many replicas as in the run that
  saved, each keeps its own; otherwise each receives the mean, so that the sum over replicas divided by their number
  stays. A method that keeps no pending gradients receives their mean in its first moment. Pending displacements of
  weights, of replicas that differ or of all, are kept, or applied to the weights.
- First moments are copied, second moments if the optimizer has them. With per-replica weights each replica receives
  its own, or the mean. The same holds for further states of single replicas.
- State that follows the layout (masks, projections, exchanges in flight) is loaded by the same layout only. Without it,
  the next exchange is complete.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from torchtitan_scape.checkpoint.metadata import CheckedReader, damaged, load_into
from torchtitan_scape.checkpoint.state import (
    PREFIX,
    WEIGHTS,
    FlatSlices,
    GlobalLayout,
    dense_state,
    has_dense_state,
    saved_weights,
    slices_of,
    stores,
    usual_norms,
)
from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.parameters import Shard, local, stored
from torchtitan_scape.core.tensors import sum_of_squares
from torchtitan_scape.methods.imported import ImportedState, SavedValues, for_moment
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.owned import OTHER_SHAPES
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.matrix_choice import other_choice
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.pytorch import state_by_kind
from torchtitan_scape.optimizers.registry import FIRST, SECOND
from torchtitan_scape.replica.checks import raise_on_all_ranks
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.simulation import ReplicaWeights

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
        entry, steps = self._entries[key], dict[str, Any]({key: 0})  # a number in some optimizers
        if isinstance(entry, TensorStorageMetadata):
            steps[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
        load_into(self.path, {"optimizer": steps})
        return float(steps[key])

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


# --------------------------------------------------------------------------------------------------- handing over


@torch.no_grad()
def migrate(optimizer: ReplicaOptimizer, reader: StateReader, same_layout: bool) -> str:
    """Load a checkpoint of any method and layout. Collective; load the model first.

    Args:
        same_layout: method, optimizer and layout are those of the run that saved.

    Returns:
        A line about the loaded state, for the log.

    Raises:
        ValueError: a value of the checkpoint's record has another type.
    """
    try:
        summary = _migrate(optimizer, reader, same_layout)
    except (TypeError, AttributeError, LookupError, AssertionError) as error:
        reason = f"loading its states fails with {type(error).__name__}: {one_line(error):.200}"
        raise damaged(reader.path, reason) from error
    return summary.text()


def _migrate(optimizer: ReplicaOptimizer, reader: StateReader, same_layout: bool) -> "_Summary":
    optimizer.prepare_to_load()
    shard_residuals = optimizer.sharding.unsent.loading(reader, optimizer.shards())
    optimizer.attempted_steps, counters = reader.saved["attempted_steps"], reader.saved["counters"]
    optimizer.guard.skipped, optimizer.guard.skipped_in_a_row = counters["skipped"], counters["skipped_in_a_row"]
    summary = _Summary(reader, optimizer, exact=same_layout and reader.saved["residual"] == "exact")
    if same_layout:
        reader.fill_of_this_shard(usual_norms(optimizer))
    keeps_moments, receivers = optimizer.options.holds_optimizer_state, list[Any]()
    if keeps_moments:
        summary.copied = summary.complete_exchange = not same_layout
        for method in optimizer.methods:
            receivers.append(method.begin_import(reader, same_layout))
    else:
        as_saved = _load_dense_state(optimizer, reader)
        summary.copied = not as_saved
        for row in range(len(optimizer.methods)):
            residuals = () if row else shard_residuals
            receivers.append(_Receiver(optimizer, reader, summary, row, residuals, same_layout, as_saved))
    for shard, imported in _imported_states(optimizer, reader, same_layout, summary):
        for row, receiver in enumerate(receivers):
            if receiver.parameter(shard, imported, row):
                summary.flushed = True
                summary.lost |= _beta1(optimizer.inner, shard) == 0.0
    for receiver in receivers:
        receiver.finish()
    if not keeps_moments:
        for method in optimizer.methods:
            method.check_second_moments(summary.second_moments_continue, optimizer.attempted_steps)
        summary.complete_exchange = _load_layout_states(optimizer, reader, same_layout)
        if summary.complete_exchange:
            optimizer.request_full_exchange()
    return summary


def _imported_states(
    optimizer: ReplicaOptimizer, reader: StateReader, same_layout: bool, summary: "_Summary"
) -> Iterator[tuple[Shard, ImportedState]]:
    """Yield each parameter with its saved state, as the method that saved it interprets it."""
    entry, decoders = METHODS[reader.saved["method"]], None
    import_state = entry.import_state
    if not same_layout and any(state["on_migration"] == "pending" for state in reader.saved["states"].values()):
        if entry.decoders_function:
            decoders = entry.saved_decoders(reader, optimizer.shards())
        summary.unreadable = decoders is None
    for shard, kinds in reader:
        decode = None if decoders is None else decoders.get(shard.name, lambda values: values)
        imported: ImportedState = import_state(kinds, reader, optimizer.grad_norm.device, decode)
        summary.count(shard, imported)
        if optimizer.options.holds_optimizer_state and imported.weights is None and imported.displacements:
            imported.weights = SavedValues(reader, None, stored(shard.parameter).detach().view(-1).clone())
        yield shard, imported


def _load_dense_state(optimizer: ReplicaOptimizer, reader: StateReader) -> bool:
    """Load the optimizer's state as it is, if both runs have it in PyTorch's form and of one class; return whether."""
    if not has_dense_state(optimizer):
        return False
    as_saved = reader.has_dense_state and reader.same_class
    state = dense_state(optimizer, to_load=as_saved)  # creates the optimizer's state if there is none
    if not as_saved:
        return False
    reader.fill(state)
    for shard in optimizer.shards():  # tensors were read in place, other values into `state`
        for key in optimizer.inner.state.get(shard.parameter, {}):
            optimizer.inner.state[shard.parameter][key] = state[f"state.{shard.name}.{key}"]
    return True


def _beta1(optimizer: Optimizer, shard: Shard) -> float:
    """Return the decay of a parameter's first moment; 0 without one, or with one of another name than PyTorch's."""
    if (state := optimizer.state.get(shard.parameter)) and FIRST not in state:
        return 0.0
    return float(optimizer.param_groups[shard.group].get("betas", (0.0,))[0])


class _Receiver:
    """Loads parameters into one replica of a run whose optimizer has the moments.

    Args:
        row: of the replica, among those of this process.
        further: states besides those of the method.
        as_saved: the optimizer's state was saved by the same optimizer, and is loaded.

    Attributes:
        store: the replica's own weights and moments, or those of all replicas for the first; None for the others.
    """

    def __init__(
        self,
        optimizer: ReplicaOptimizer,
        reader: StateReader,
        summary: "_Summary",
        row: int,
        further: Sequence[State],
        same_layout: bool,
        as_saved: bool,
    ) -> None:
        self.method, self.reader, self.summary, self.further = optimizer.methods[row], reader, summary, further
        self.inner = optimizer.inner
        self.same_layout, self.as_saved, self.per_replica = same_layout, as_saved, bool(optimizer.weights)
        shards, inner = optimizer.shards(), optimizer.inner
        each = stores(optimizer) or [ReplicaWeights(shards, inner, *state_by_kind(inner, shards))]
        self.store = each[row] if row < len(each) else None
        self.weights = {shard.name: shard.parameter for shard in self.store.shards} if self.store is not None else {}

    def parameter(self, shard: Shard, imported: ImportedState, row: int) -> bool:
        """Load one parameter into the replica. Collective. Return whether its first moment has pending gradients."""
        for kind in imported.kinds:
            self.method.allocate(kind, shard.name)
        states = [state for state in (*self.method.states(), *self.further) if state.by_parameter]
        self.summary.second_moments_continue &= self.as_saved or imported.exp_avg_sq is not None
        self._put_weights(shard.name, imported, row, states)
        keeps_pending = self._put_pending(shard.name, imported, row, states)
        flushes = imported.pending is not None and not keeps_pending
        if self.store is not None and (flushes or not self.as_saved):
            self._put_moments(shard, imported, row, flushes)
        self._copy(states, shard.name, imported, row)
        return flushes and self.store is not None

    def finish(self) -> None:
        """Load the optimizer's state that is not by parameter. Collective."""
        if self.as_saved:
            return
        if not self.same_layout or self.reader.has_dense_state:
            self._load_other_shapes()
        # Bias corrections of moments that begin at zero begin anew as well.
        continues = self.reader.same_class or self.summary.moments_continue
        if self.store is not None:
            self.store.set_steps(self.reader.applied_steps() if continues else 0.0)

    def _load_other_shapes(self) -> None:
        """Load the optimizer's state of other shapes than the parameters', if neither run shards these."""
        targets, reader = dict[str, Tensor](), self.reader
        is_whole = reader.same_class and reader.saved["shard"] == reader.model_ranks == 1
        for kind, tensors in self.store.others.items() if self.store is not None else ():
            for name, values in tensors.items():
                saved = [f"state.{name}.{kind}", f"{OTHER_SHAPES}{kind}.{name}.0"] if is_whole else []
                keys = [key for key in saved if reader.shape(key) == values.shape]
                targets |= dict.fromkeys(keys, values)
                self.summary.further_continue |= bool(keys)
                self.summary.restarts |= not keys
        reader.fill(targets)

    def _values(self, saved: SavedValues, row: int) -> Tensor:
        """Return a replica's values (n,), or their mean if this run's replicas do not differ. Collective."""
        return saved.of_replica(row) if self.per_replica else saved.mean

    def _put_weights(self, name: str, imported: ImportedState, row: int, states: list[State]) -> None:
        """Load weights of replicas that differed, and pending changes of weights: into the state of their kind, else
        into the weights.
        """
        weight = None
        if self.store is not None and (row == 0 or self.per_replica):  # else another replica has loaded it
            weight = stored(self.weights[name])
        start = None if imported.weights is None else self._values(imported.weights, row)
        for kind, saved in imported.displacements.items():
            displacement = self._values(saved, row)
            kept = [s for s in states if s.kind == kind and s.on_migration == "displacement"]
            if kept and (kept[0].starts is not None or name in kept[0].tensors):
                if name in kept[0].tensors:  # else another replica keeps it
                    kept[0].load_entries(name, displacement)
            elif start is not None:
                start = start - displacement
            elif weight is not None:
                weight.sub_(displacement.view(weight.shape))
        if start is not None and weight is not None:
            weight.copy_(start.view(weight.shape))

    def _put_pending(self, name: str, imported: ImportedState, row: int, states: list[State]) -> bool:
        """Load pending gradients; return whether this method keeps any of this parameter."""
        targets = [state for state in states if state.on_migration == "gradient" and name in state.tensors]
        pending = imported.pending
        # Several kinds keep what they had if every replica does.
        each_its_own = len(targets) > 1 and pending is not None and pending.shared is None and self.reader.same_count
        each_its_own = each_its_own and any(state.kind in imported.kinds for state in targets)
        for i, state in enumerate(targets):
            target, values = state.tensors[name], None
            if each_its_own:
                values = imported.kinds[state.kind][row] if state.kind in imported.kinds else None
            elif i == 0 and pending is not None:
                values = pending.of_replica(row)
            if values is None:
                target.zero_()
            else:
                target.copy_(values.view(target.shape))
        return bool(targets)

    def _put_moments(self, shard: Shard, imported: ImportedState, row: int, flush: bool) -> None:
        """Load the moments that the optimizer keeps of this parameter; `flush` adds pending gradients to the first."""
        store = self.store
        assert store is not None

        moment = None if imported.exp_avg is None else self._values(imported.exp_avg, row)
        second = None if imported.exp_avg_sq is None else self._values(imported.exp_avg_sq, row)
        if flush:
            assert imported.pending is not None
            added = for_moment(imported.pending.mean, _beta1(self.inner, shard))
            moment = added if moment is None else moment + added
        for kind, further in imported.copies.items() if self.reader.same_class else ():
            self.summary.further_continue |= kind in store.moments  # of another replica, perhaps
            values = self._values(further, row)  # collective, also where another replica has the target
            if (target := store.moments.get(kind, {}).get(shard.name)) is not None:
                target.copy_(store.within(shard.name, values))
        target = store.moments.get(FIRST, {}).get(shard.name)
        self.summary.moments_continue |= moment is not None and target is not None
        target_sq = store.moments.get(SECOND, {}).get(shard.name)
        if target is None:
            if second is not None and target_sq is not None:  # as Adafactor of transformers
                target_sq.copy_(store.within(shard.name, second))
            return
        target.copy_(torch.zeros_like(target) if moment is None else store.within(shard.name, moment))
        if target_sq is None:
            return
        # With the first moment's square, AdamW's next step is that of AdamS, which normalizes by its moment. A second
        # moment that has seen single gradients only would make a step of any length out of pending gradients of many.
        square = target.square()
        saved = target_sq if self.as_saved else None if second is None else store.within(shard.name, second)
        if saved is not None:
            square = torch.maximum(saved, square) if flush else saved
        target_sq.copy_(square)

    def _copy(self, states: list[State], name: str, imported: ImportedState, row: int) -> None:
        """Load state that every method of the same kind can continue with, or that needs the same layout.

        Of a replica its own, or the replicas' mean. Weights of a replica that are part of the model's mean are loaded
        as well: the model was loaded before.
        """
        for state in states:
            continues = state.on_migration == "copy" or (state.on_migration == "model" and state.per_replica)
            if not continues and not (state.on_migration in ("rebuild", "pending") and self.same_layout):
                continue
            values, described = imported.kinds.get(state.kind), self.reader.saved["states"].get(state.kind, {})
            if values is None or described.get("on_migration") != state.on_migration or name not in state.tensors:
                continue
            target = state.tensors[name]
            if values.dtype != target.dtype and not (values.is_floating_point() and target.is_floating_point()):
                continue
            if state.per_replica and described["per_replica"]:
                values = imported.copies[state.kind].of_replica(row)
            state.load_entries(name, values)


def _load_layout_states(optimizer: ReplicaOptimizer, reader: StateReader, same_layout: bool) -> bool:
    """Load the state that only the same layout can use. Return whether it is missing, so that the next exchange must be
    complete.
    """
    each = [method.states() for method in optimizer.methods]
    if not same_layout:
        return any(state.on_migration == "rebuild" for state in each[0])
    for states, store in zip(each, stores(optimizer) if not optimizer.weights else (), strict=False):
        states += store.states()
    loaded = [reader.fill_of_this_shard(states) for states in each]
    return not all(loaded)


class _Summary:
    """The state that a run received from a checkpoint. `text` describes it for the log.

    Args:
        exact: the same method and layout load an exact save: all state as it was.

    Attributes:
        copied: moments were copied parameter by parameter, because another optimizer had saved them.
        moments_continue: there was a first moment, and this run has it.
        further_continue: there was other state than first and second moments, and this run has it.
        flushed: pending gradients were added to first moments.
        lost: pending gradients of parameters without a first moment, or with beta1 = 0.
        restarts: some of the optimizer's state is of other shapes than the parameters', and begins anew.
        complete_exchange: the next exchange is complete.
        unreadable: pending gradients in coordinates that only the layout, method and options that saved them know.
        second_moments_continue: there were second moments of all parameters.
    """

    def __init__(self, reader: StateReader, optimizer: ReplicaOptimizer, exact: bool) -> None:
        self._reader, self._optimizer, self._exact = reader, optimizer, exact
        self._squares = torch.zeros((), dtype=torch.float64, device=optimizer.grad_norm.device)
        self._has_pending = False
        self.copied = self.moments_continue = self.flushed = self.lost = self.complete_exchange = False
        self.unreadable = self.restarts = self.further_continue = False
        self.second_moments_continue = True

    def count(self, shard: Shard, imported: ImportedState) -> None:
        """Add a parameter to the norm of the pending gradients' mean. Collective."""
        if self._exact or imported.pending is None:
            return
        self._has_pending = True
        if shard.counted:
            self._squares += sum_of_squares(imported.pending.mean)

    def text(self) -> str:
        """Return a line about the loaded state. Collective."""
        replicas_differ = bool(self._optimizer.weights)
        if self._exact and not self.complete_exchange:
            return "state as it was saved" + (", every replica its own" if replicas_differ else "")
        self.further_continue = any(self._optimizer.collectives.gather_objects(self.further_continue))
        parts = [self._weights_and_moments(), self._pending()]
        if self.lost:
            parts.append("without a first moment, or with beta1 = 0, pending gradients are lost")
        if self.unreadable:
            parts.append("pending gradients are lost: they are stored in the bases of other shards")
        if any(self._optimizer.collectives.gather_objects(self.restarts)):  # owners have different parts
            parts.append("the optimizer's state of other shapes than the parameters' begins anew")
        if self.complete_exchange:
            parts.append("the next exchange is complete")
        return "; ".join(part for part in parts if part)

    def _weights_and_moments(self) -> str:
        reader = self._reader
        if not METHODS[reader.saved["method"]].options.per_replica_weights:
            if self._optimizer.weights:
                return "all replicas start from the model and its moments"
            if not self.copied:
                return "moments as they were saved"
            holds = self._optimizer.options.holds_optimizer_state
            if holds or self.moments_continue:
                return "the first moment was copied"
            return "moments were copied" if self.further_continue else "no moments continue"
        if reader.saved["residual"] == "drop":
            return "all replicas start from the saved model and the mean of the moments"
        if reader.saved["residual"] != "exact":
            return "all replicas start from the mean of weights and moments, as it was saved"
        if self._optimizer.weights and reader.same_count:
            return "every replica continues from its own weights and moments"
        return f"all replicas start from the mean of {reader.replicas} replicas' weights and moments"

    def _pending(self) -> str:
        residual = self._reader.saved["residual"]
        if residual == "drop":
            return "pending updates were not saved and are lost"
        if not self._has_pending:
            return ""
        norm = f"(norm {float(self._optimizer.collectives.sum_over_model(self._squares.float()).sqrt()):.3g})"
        if self.flushed:
            return f"the mean of the pending gradients {norm} was added to the first moment"
        if residual == "mean":
            return f"every replica starts from the mean of the pending gradients, as it was saved {norm}"
        if self._reader.same_count:
            return f"every replica keeps its pending gradients {norm}"
        return f"every replica receives the mean of {self._reader.replicas} replicas' pending gradients {norm}"
