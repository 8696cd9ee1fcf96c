"""Loading a checkpoint's optimizer state into a run of any method and layout.

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

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.checkpoint.migration_summary import MigrationSummary
from torchtitan_scape.checkpoint.param_groups import PREFIX
from torchtitan_scape.checkpoint.record_format import damaged
from torchtitan_scape.checkpoint.state import dense_state, has_dense_state, load_dense_state, stores, usual_norms
from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.parameters import Shard, stored
from torchtitan_scape.methods.imported import CheckpointReader, ImportedState, SavedValues, for_moment
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.owned import OTHER_SHAPES
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.registry import FIRST, SECOND
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.simulation import ReplicaWeights, rows_of

# By parameter, a function that returns its pending gradients in the model's own coordinates.
Decoders = dict[str, Callable[[Tensor], Tensor]]


@torch.no_grad()
def migrate(optimizer: ReplicaOptimizer, reader: CheckpointReader, same_layout: bool, step: int) -> MigrationSummary:
    """Load a checkpoint of any method and layout. Collective; load the model first.

    Args:
        same_layout: method, optimizer and layout are those of the run that saved.
        step: of the checkpoint.

    Raises:
        ValueError: a value of the checkpoint's record has another type.
    """
    try:
        return _migrate(optimizer, reader, same_layout, step)
    except (TypeError, AttributeError, LookupError, AssertionError) as error:
        raise damaged(
            reader.path, f"loading its states fails with {type(error).__name__}: {one_line(error):.200}"
        ) from error


def _migrate(optimizer: ReplicaOptimizer, reader: CheckpointReader, same_layout: bool, step: int) -> MigrationSummary:
    optimizer.prepare_to_load()
    shard_residuals = optimizer.sharding.unsent.loading(reader, optimizer.shards())
    # Format 1 stored the counter among the values of a method that performs the update itself.
    records = [reader.saved, *(value for value in reader.saved.values() if isinstance(value, dict))]
    counted = [record["attempted_steps"] for record in records if "attempted_steps" in record]
    optimizer.attempted_steps = counted[0] if counted else step
    exact = same_layout and reader.saved["residual"] == "exact"
    summary = MigrationSummary(reader, exact, optimizer)
    if same_layout:
        reader.fill_of_this_shard(usual_norms(optimizer))
    saved = reader.saved["states"].values()
    decoders = None
    if not same_layout and any(state["on_migration"] == "pending" for state in saved):
        decoders = METHODS[reader.saved["method"]].saved_decoders(reader, optimizer.shards())
        summary.unreadable = decoders is None
    if optimizer.methods[0].holds_optimizer_state:
        summary.copied = not same_layout
        imports = [method.begin_import(reader, same_layout, optimizer.attempted_steps) for method in optimizer.methods]
        for shard, imported in _parameters(optimizer, reader, decoders):
            summary.count(shard, imported)
            if imported.weights is None and imported.displacements:
                imported.weights = SavedValues(reader, None, stored(shard.parameter).detach().view(-1).clone())
            for row, one in enumerate(imports):
                summary.flushed |= one.parameter(shard, imported, row)
        for one in imports:
            one.finish()
        summary.complete_exchange = not same_layout
        return summary
    receiver = _Receiver(optimizer, reader, shard_residuals, summary, same_layout, decoders)
    receiver.load()
    for method in optimizer.methods:
        method.check_second_moments(receiver.second_moments_continue, optimizer.attempted_steps)
    summary.complete_exchange = _load_layout_states(optimizer, reader, same_layout)
    if summary.complete_exchange:
        optimizer.request_full_exchange()
    return summary


def _parameters(
    optimizer: ReplicaOptimizer, reader: CheckpointReader, decoders: Decoders | None
) -> Iterator[tuple[Shard, ImportedState]]:
    import_state = METHODS[reader.saved["method"]].import_state
    for _, shard, kinds in reader:
        decode = None if decoders is None else decoders.get(shard.name, lambda values: values)
        yield shard, import_state(kinds, reader, optimizer.grad_norm.device, decode)


class _Receiver:
    """Loads the state of parameters into a run whose optimizer holds the moments.

    Attributes:
        stores: weights and moments: one of each replica of this process if they differ, else a single one.
        same_class: the optimizer that saved is of the same class.
        same_optimizer: the optimizer's state was saved by the same optimizer, and loaded as it was.
        second_moments_continue: there were second moments of all parameters.
    """

    def __init__(
        self,
        optimizer: ReplicaOptimizer,
        reader: CheckpointReader,
        shard_residuals: list[State],
        summary: MigrationSummary,
        same_layout: bool,
        decoders: Decoders | None,
    ) -> None:
        self.optimizer, self.reader, self.summary, self.decoders = optimizer, reader, summary, decoders
        self.shard_residuals, self.same_layout = shard_residuals, same_layout
        self.same_class = reader.saved["optimizer"] == type(optimizer.inner).__name__
        self.same_optimizer = has_dense_state(optimizer) and reader.has_dense_state and self.same_class
        if has_dense_state(optimizer):
            state = dense_state(optimizer)  # creates the optimizer's state if there is none
            if self.same_optimizer:
                moments = {key: value for key, value in state.items() if not key.startswith(PREFIX)}
                reader.fill(moments)
                load_dense_state(optimizer, state | moments)
        summary.copied = not self.same_optimizer
        self.second_moments_continue = True
        self.stores = stores(optimizer) or [ReplicaWeights.with_state_of(optimizer.shards(), optimizer.inner)]

    def load(self) -> None:
        for index, (shard, imported) in enumerate(_parameters(self.optimizer, self.reader, self.decoders)):
            self.summary.count(shard, imported)
            self.second_moments_continue &= self.same_optimizer or imported.exp_avg_sq is not None
            for row, states in enumerate(self._states(shard, imported)):
                if row < len(self.stores):
                    self._put_weights(self.stores[row], index, imported, row, states)
                if imported.weights is None:
                    self._put_shared_displacements(index, imported, row, states)
                keeps_pending = self._put_pending(shard, imported, row, states)
                if row < len(self.stores) and not (self.same_optimizer and (keeps_pending or imported.pending is None)):
                    self._put_moments(self.stores[row], shard, imported, row, flush=not keeps_pending)
                self._copy(states, shard, imported, row)
        if not self.same_optimizer:
            if not self.same_layout or self.reader.has_dense_state:
                self._load_other_shapes()
            # Bias corrections of moments that begin at zero begin anew as well.
            applied = self.reader.applied_steps() if self.same_class or self.summary.moments_continue else 0.0
            for steps in (steps for store in self.stores for steps in store.steps()):
                steps.fill_(applied)

    def _load_other_shapes(self) -> None:
        """Load the optimizer's state of other shapes than the parameters', if neither run shards these."""
        found = dict[str, Tensor]()
        is_whole = self.same_class and self.reader.saved["shard"] == self.reader.model_ranks == 1
        for store in self.stores:
            for kind, tensors in store.others.items():
                for name, values in tensors.items():
                    saved = [f"state.{name}.{kind}", f"{OTHER_SHAPES}{kind}.{name}.0"] if is_whole else []
                    keys = [key for key in saved if self.reader.shape(key) == values.shape]
                    found |= dict.fromkeys(keys, values)
                    self.summary.further_continue |= bool(keys)
                    self.summary.restarts |= not keys
        self.reader.fill(found)

    def _states(self, shard: Shard, imported: ImportedState) -> list[list[State]]:
        """Return the states of this parameter by replica; the first replica's include those of the shard axis."""
        methods = self.optimizer.methods
        for method in methods:
            for kind in imported.kinds:
                method.allocate(kind, shard.name)
        each = [method.states() for method in methods]
        each[0] = [*each[0], *self.shard_residuals]
        return [[state for state in states if state.by_parameter] for states in each]

    def _put_weights(
        self, store: ReplicaWeights, index: int, imported: ImportedState, row: int, states: list[State]
    ) -> None:
        if imported.weights is None:
            return
        weight = stored(store.shards[index].parameter)
        if not self.optimizer.weights:
            mean = imported.mean_weights()
            assert mean is not None
            weight.copy_(mean.view(weight.shape))
            return
        start = imported.weights.of_replica(row)
        name = store.shards[index].name
        displacements = {
            s.kind: s.tensors[name] for s in states if s.on_migration == "displacement" and name in s.tensors
        }
        for kind, values in imported.displacements.items():
            if kind in displacements:
                displacements[kind].copy_(values.of_replica(row).view(displacements[kind].shape))
            else:
                start = start - values.of_replica(row)
        weight.copy_(start.view(weight.shape))

    def _put_shared_displacements(self, index: int, imported: ImportedState, row: int, states: list[State]) -> None:
        """Load changes that all replicas have in common: into the state of their kind, else into the weights."""
        name = self.optimizer.shards()[index].name
        for kind, values in imported.displacements.items():
            kept = [s for s in states if s.kind == kind and s.on_migration == "displacement"]
            if kept and (kept[0].starts is not None or name in kept[0].tensors):
                if name in kept[0].tensors:  # else another replica keeps it
                    kept[0].load_entries(name, values.of_replica(row))
            elif row < len(self.stores) and (row == 0 or self.optimizer.weights):
                weight = stored(self.stores[row].shards[index].parameter)
                weight.sub_(values.of_replica(row).view(weight.shape))

    def _put_pending(self, shard: Shard, imported: ImportedState, row: int, states: list[State]) -> bool:
        """Load pending gradients; return whether this method keeps any of this parameter."""
        targets = [state for state in states if state.on_migration == "gradient" and shard.name in state.tensors]
        pending, reader = imported.pending, self.reader
        # Several kinds keep what they had if every replica does.
        each_its_own = len(targets) > 1 and pending is not None and pending.shared is None and reader.same_count
        if each_its_own and any(state.kind in imported.kinds for state in targets):
            for state in targets:
                target = state.tensors[shard.name]
                saved = imported.kinds.get(state.kind)
                target.zero_() if saved is None else target.copy_(saved[row].view(target.shape))
            return True
        first = True
        for state in targets:
            target = state.tensors[shard.name]
            if first and pending is not None:
                target.copy_(pending.of_replica(row).view(target.shape))
            else:
                target.zero_()
            first = False
        return bool(targets)

    def _put_moments(self, store: ReplicaWeights, shard: Shard, imported: ImportedState, row: int, flush: bool) -> None:
        """Load the moments that the optimizer keeps of this parameter; `flush` adds pending gradients to the first."""
        per_replica, beta1 = bool(self.optimizer.weights), _beta1(store.optimizer, shard)

        def values(saved: Any) -> Tensor | None:
            return None if saved is None else saved.of_replica(row) if per_replica else saved.mean

        moment, second = values(imported.exp_avg), values(imported.exp_avg_sq)
        flush = flush and imported.pending is not None
        if flush:
            assert imported.pending is not None
            added = for_moment(imported.pending.mean, beta1)
            moment = added if moment is None else moment + added
            self.summary.flushed, self.summary.lost = True, self.summary.lost or beta1 == 0.0
        for kind, further in imported.copies.items() if self.same_class else ():
            self.summary.further_continue |= kind in store.moments  # of another replica, perhaps
            if (target := store.moments.get(kind, {}).get(shard.name)) is not None:
                found = values(further)
                assert found is not None
                target.copy_(store.within(shard.name, found))
        target = store.moments.get(FIRST, {}).get(shard.name)
        self.summary.moments_continue |= moment is not None and target is not None
        if target is None:
            return
        target.copy_(torch.zeros_like(target) if moment is None else store.within(shard.name, moment))
        target_sq = store.moments.get(SECOND, {}).get(shard.name)
        if target_sq is None:
            return
        # With the first moment's square, AdamW's next step is that of AdamS, which normalizes by its moment. A second
        # moment that has seen single gradients only would make a step of any length out of pending gradients of many.
        square = target.square()
        saved = target_sq if self.same_optimizer else None if second is None else store.within(shard.name, second)
        if saved is not None:
            square = torch.maximum(saved, square) if flush else saved
        target_sq.copy_(square)

    def _copy(self, states: list[State], shard: Shard, imported: ImportedState, row: int) -> None:
        """Load state that every method of the same kind can continue with, or that needs the same layout.

        Of a replica its own, or the replicas' mean. Weights of a replica that are part of the model's mean are loaded
        as well: the model was loaded before.
        """
        for state in states:
            continues = state.on_migration == "copy" or (state.on_migration == "model" and state.per_replica)
            if not continues and not (state.on_migration in ("rebuild", "pending") and self.same_layout):
                continue
            values, described = imported.kinds.get(state.kind), self.reader.saved["states"].get(state.kind, {})
            if values is None or described.get("on_migration") != state.on_migration or shard.name not in state.tensors:
                continue
            target = state.tensors[shard.name]
            if values.dtype != target.dtype and not (values.is_floating_point() and target.is_floating_point()):
                continue
            if state.per_replica and described["per_replica"]:
                values = imported.copies[state.kind].of_replica(row)
            state.load_entries(shard.name, values)


def _load_layout_states(optimizer: ReplicaOptimizer, reader: CheckpointReader, same_layout: bool) -> bool:
    """Load the state that only the same layout can use. Return whether it is missing, so that the next exchange must be
    complete.
    """
    each = [method.states() for method in optimizer.methods]
    if not same_layout:
        return any(state.on_migration == "rebuild" for state in each[0])
    for states, store in zip(each, stores(optimizer) if not optimizer.weights else (), strict=False):
        states += [state for state in store.states() if not state.by_parameter]
    each = [[state for state in states if not state.by_parameter] for states in each]
    loaded = rows_of(each)
    missing = not reader.fill_of_this_shard(loaded)
    for states in each:
        for state, source in zip(states, loaded, strict=True):
            for name, values in state.tensors.items():
                values.copy_(source.tensors[name])
    return missing


def _beta1(optimizer: torch.optim.Optimizer, shard: Shard) -> float:
    """Return the factor of the first moment in a step; 0 if there is none."""
    return float(optimizer.param_groups[shard.group].get("betas", (0.0,))[0])
