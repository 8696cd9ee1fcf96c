"""How a checkpoint's state is taken by this run: as it is, or by the rule for another layout, replica count or method.

The rule: what replicas have not delivered yet is never lost. Where there are as many replicas each keeps its own; where
there are more or fewer, each gets the mean of all, so that the sum over replicas divided by their number stays. With a
method that keeps nothing pending it enters the first moment, which the next step takes times b1. First moments are
copied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.parameters import Shard, local, stored
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.pending import NO_MOMENT, CheckpointReader, ImportedState, NormAccumulator, beta1_of
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.registry import FIRST, SECOND


@torch.no_grad()
def load_synced(
    optimizer: torch.optim.Optimizer,
    each: list[list[State]],
    collectives: ReplicaCollectives,
    device: torch.device,
    reader: CheckpointReader,
    same_layout: bool,
    read_optimizer: Callable[[], None],
) -> tuple[str, bool]:
    """Takes a checkpoint's state. A collective call, after loading the model.

    optimizer: whose state exists. each: the states of every replica's method of this process.
    as_it_lies: method and layout are those of the run that saved.
    read_optimizer: takes the optimizer's own state as it was saved, which is of the same optimizer.
    Returns what was done, in words, and whether the next exchange has to be whole.
    """
    keeps = [state for state in each[0] if state.on_migration == "gradient"]
    same_optimizer = reader.saved["optimizer"] == type(optimizer).__name__ and reader.has_dense_state
    if same_optimizer:
        read_optimizer()
    norm, flushed, lost, moments = NormAccumulator(collectives, device), False, False, False
    read = METHODS[reader.saved["method"]].incoming
    for _, shard, kinds in reader:
        beta1 = beta1_of(optimizer, shard)
        found = read(kinds, reader, device)
        moments = moments or found.moment is not None
        if not same_optimizer:
            _put_moments(optimizer, shard, found.moment, found.second, flushed=False)
        if found.parameter is not None:
            own = stored(shard.parameter)
            own.copy_(found.parameter.view(own.shape))
        copy_shared(each, shard, kinds, reader.saved["states"])
        mean = found.mean(reader)
        if mean is not None:
            norm.add(shard, mean)
        if any(shard.name in state.tensors for state in keeps):
            _keep_pending(each, keeps, shard, kinds, found, mean, reader)
        elif mean is not None:
            flushed, lost = True, lost or beta1 == 0.0
            second = optimizer.state[shard.parameter].get(SECOND) if same_optimizer else found.second
            _put_moments(optimizer, shard, found.moment_with(mean, beta1), second, flushed=True)
    if not same_optimizer:
        steps = reader.applied_steps()
        for state in optimizer.state.values():  # moments that begin at zero are corrected as such
            state["step"].fill_(steps if moments or flushed else 0.0)
    rebuilt = fill_of_this_shard(each, reader) if same_layout else any(s.on_migration == "rebuild" for s in each[0])
    goes_on = None if same_optimizer else moments and any(FIRST in state for state in optimizer.state.values())
    migration_summary = _summary(reader, goes_on, bool(keeps), flushed, rebuilt, norm)
    return migration_summary + (f"; {NO_MOMENT} keeps it: it is lost" if lost else ""), rebuilt


def _summary(
    reader: CheckpointReader, goes_on: bool | None, keeps: bool, flushed: bool, rebuilt: bool, norm: NormAccumulator
) -> str:
    """goes_on: whether there was a first moment and still is, with another optimizer; None for the same."""
    migration_summary = {None: [], True: ["the first moment copied"], False: ["no moments go on"]}[goes_on]
    pending = any(what["carries"] == "gradient" for what in reader.saved["states"].values())
    if reader.saved.get("residual") == "drop":
        migration_summary.append("residuals were not saved and are lost")
    elif flushed and not keeps:
        migration_summary.append(f"the mean of the residuals (norm {norm.text()}) is flushed into the first moment")
    elif pending and reader.saved.get("residual") == "mean":
        migration_summary.append(
            f"every replica starts from the mean of the residuals, as it was saved (norm {norm.text()})"
        )
    elif pending and not reader.same_count:
        migration_summary.append(f"the mean of {reader.replicas} residuals is kept (norm {norm.text()})")
    elif pending and migration_summary:
        migration_summary.append(f"every replica keeps its residual (norm {norm.text()})")
    if rebuilt:
        migration_summary.append("the next step is dense")
    return "; ".join(migration_summary) or "state as it was"


def _put_moments(
    optimizer: torch.optim.Optimizer, shard: Shard, moment: Tensor | None, second: Tensor | None, flushed: bool
) -> None:
    """As far as the optimizer keeps them of this parameter. None: there is none to take. flushed: whether the
    first one has what was pending in it."""
    state = optimizer.state[shard.parameter]
    if FIRST not in state:
        return
    own = local(state[FIRST])
    own.copy_(torch.zeros_like(own) if moment is None else moment.view(own.shape))
    if SECOND not in state:
        return
    # With the first one's square AdamW's next step is that of AdamS, whose normaliser is its moment. A second one that
    # has seen single gradients alone would make a step of any length of what many have left.
    mine, square = local(state[SECOND]), own.square()
    if second is not None:
        saved = local(second).view(own.shape)
        square = torch.maximum(saved, square) if flushed else saved
    mine.copy_(square)


def copy_shared(
    each: Sequence[list[State]], shard: Shard, kinds: dict[str, Tensor], saved: dict[str, dict[str, Any]]
) -> None:
    """What goes on as it is, into the states of every replica of this process. saved: what each kind was to the run
    that saved."""
    for states in each:
        for state in states:
            mine = state.tensors.get(shard.name) if state.by_parameter and state.on_migration == "copy" else None
            was = saved.get(state.kind, {}).get("carries")
            if mine is not None and was == "copy" and state.kind in kinds and kinds[state.kind].dtype == mine.dtype:
                state.load_entries(shard.name, kinds[state.kind])


def _keep_pending(
    each: list[list[State]],
    keeps: list[State],
    shard: Shard,
    kinds: dict[str, Tensor],
    found: ImportedState,
    mean: Tensor | None,
    reader: CheckpointReader,
) -> None:
    """Every replica of this process gets what is pending: its own where there are as many, else the mean."""
    own = found.own if reader.same_count else None
    exact = own is not None and found.common is None
    for i, states in enumerate(each):
        first = True
        for state in (s for s in states if s.on_migration == "gradient" and shard.name in s.tensors):
            mine = state.tensors[shard.name]
            if exact and len(keeps) > 1 and state.kind in kinds:
                mine.copy_(kinds[state.kind][i].view(mine.shape))  # each kind to its own
                continue
            if not first or mean is None:
                mine.zero_()
            elif own is not None:
                values = own[i] if found.common is None else own[i] + found.common
                mine.copy_(values.view(mine.shape))
            else:
                mine.copy_(mean.view(mine.shape))
            first = False


def fill_of_this_shard(each: Sequence[list[State]], reader: CheckpointReader) -> bool:
    """Reads what only the same layout can use; whether something was missing."""
    missing = not reader.fill_of_this_shard(each[0])
    for states in each[1:]:
        for mine, first in zip(states, each[0], strict=True):
            for name, values in mine.tensors.items() if not mine.by_parameter else ():
                values.copy_(first.tensors[name])
    return missing
