"""How a checkpoint's state is taken by a run whose replicas differ between exchanges.

The model in a checkpoint is what replicas share. From a run of the same kind each replica goes on from its own
parameters, moments and residual where there are as many, else from the means of all. From any other run all start at
the model with its moments, what was pending in the first one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.checkpoint.migration import copy_shared, fill_of_this_shard
from torchtitan_scape.core.parameters import stored
from torchtitan_scape.methods.interface import Method, State
from torchtitan_scape.methods.pending import NO_MOMENT, REPLICA_WEIGHTS, CheckpointReader, beta1_of
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.registry import FIRST, SECOND
from torchtitan_scape.replica.simulation import ReplicaWeights


@torch.no_grad()
def load_local(
    each: Sequence[ReplicaWeights],
    methods: Sequence[Method],
    device: torch.device,
    reader: CheckpointReader,
    same_layout: bool,
) -> tuple[str, bool]:
    """Takes a checkpoint's state. A collective call, after the model, which all replicas have taken.

    each, methods: of this process's replicas. Returns what was done, in words, and whether the next exchange has to be
    whole.
    """
    entry = METHODS[reader.saved["method"]]
    from_local = entry.method.per_replica_weights
    lost = moments = False
    for number, shard, kinds in reader:
        name = shard.name
        for method in methods:
            for kind in kinds:
                method.allocate(kind, name)
        states = [method.states() for method in methods]
        if from_local:
            values = {kind: _for_each(kind, kinds, len(each), reader, device) for kind in kinds}
            _put_own(each, number, name, values)
            moments = moments or FIRST in values
            _put_pending(each, number, name, states, values, reader)
        else:
            found = entry.incoming(kinds, reader, device)
            mean, beta1 = found.mean(reader), beta1_of(each[0].optimizer, shard)
            moment = found.moment_with(mean, beta1)
            moments, lost = moments or moment is not None, lost or (mean is not None and beta1 == 0.0)
            second = found.second
            if mean is not None and second is not None and moment is not None:
                second = torch.maximum(second, moment.square())  # as in `loading`
            _put_moments(each, name, *(None if m is None else [m] * len(each) for m in (moment, second)))
        copy_shared(states, shard, kinds, reader.saved["states"])
    applied = reader.applied_steps()
    if not moments and reader.saved["optimizer"] != type(each[0].optimizer).__name__:
        applied = 0.0  # as in `loading`
    for steps in (steps for one in each for steps in one.steps()):
        steps.fill_(applied)
    states = [method.states() for method in methods]
    rebuilt = fill_of_this_shard(states, reader) if same_layout else any(s.on_migration == "rebuild" for s in states[0])
    migration_summary = _summary(reader, from_local, each[0].optimizer) + (
        ", the next exchange is whole" if rebuilt else ""
    )
    return migration_summary + (f"; {NO_MOMENT} keeps what was pending: it is lost" if lost else ""), rebuilt


def _summary(reader: CheckpointReader, from_local: bool, optimizer: torch.optim.Optimizer) -> str:
    if not from_local:
        return "all replicas start at the model, with its moments"
    if reader.saved["residual"] == "drop":
        return "all replicas start at the model, with the mean of their moments; the rest was not saved"
    if reader.saved["residual"] == "mean":
        return "all replicas start from the means of parameters, moments and residuals, as they were saved"
    if not reader.same_count:
        return f"all replicas start from the means of {reader.replicas} replicas' parameters, moments and residuals"
    if reader.saved["optimizer"] != type(optimizer).__name__:
        return "every replica goes on from its own parameters, and its moments as far as both optimizers keep them"
    return "state as it was, of every replica its own"


def _for_each(
    kind: str, kinds: dict[str, Tensor], replicas: int, reader: CheckpointReader, device: torch.device
) -> list[Tensor]:
    """(n,) for every replica of this process: its own where there are as many, else the mean of all."""
    values = kinds[kind].to(device)
    if not reader.saved["states"][kind]["own"]:
        return [values] * replicas
    return list(values) if reader.same_count else [reader.mean(values)] * replicas


def _put_own(each: Sequence[ReplicaWeights], number: int, name: str, values: dict[str, list[Tensor]]) -> None:
    """Parameters, where they were saved, and moments."""
    for one, parameter in zip(each, values.get(REPLICA_WEIGHTS, ()), strict=False):
        own = stored(one.shards[number].parameter)
        own.copy_(parameter.view(own.shape))
    _put_moments(each, name, values.get(FIRST), values.get(SECOND))


def _put_moments(
    each: Sequence[ReplicaWeights], name: str, first: list[Tensor] | None, second: list[Tensor] | None
) -> None:
    """As far as the optimizers keep them of this parameter. None: there are none to take."""
    for i, one in enumerate(each):
        if name not in one.moments.get(FIRST, {}):
            continue
        own = one.moments[FIRST][name]
        own.copy_(torch.zeros_like(own) if first is None else first[i].view(own.shape))
        if name in one.moments.get(SECOND, {}):
            # Without one it is the first one's square, which makes AdamS's step: see `loading`.
            square = one.moments[SECOND][name]
            square.copy_(own.square() if second is None else second[i].view(own.shape))


def _put_pending(
    each: Sequence[ReplicaWeights],
    number: int,
    name: str,
    states: Sequence[list[State]],
    values: dict[str, list[Tensor]],
    reader: CheckpointReader,
) -> None:
    """What replicas have not sent of their displacements: a parameter that is moved as much further says it, too."""
    left = [
        kind
        for kind, what in reader.saved["states"].items()
        if what["carries"] == "displacement" and kind != REPLICA_WEIGHTS and kind in values
    ]
    for i, one in enumerate(each):
        mine = {s.kind: s.tensors[name] for s in states[i] if s.on_migration == "displacement" and name in s.tensors}
        for kind in left:
            if kind in mine:
                mine[kind].copy_(values[kind][i].view(mine[kind].shape))
            else:
                own = stored(one.shards[number].parameter)
                own.sub_(values[kind][i].view(own.shape))
