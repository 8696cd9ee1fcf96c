"""How a checkpoint's optimizer state is taken by this run: as it is, or by the rule for another layout or method.

The rule: what replicas have not delivered yet is never lost. Where there are as many replicas each keeps its residual;
where there are more or fewer, each gets the mean of all, so that the sum over replicas divided by their number stays.
The first moment is copied. Blocks and runs are laid out anew, so that the next step is dense and sends it all. A dense
optimizer has no residual: there it enters the first moment at once, which the next step takes times b1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from torchtitan_scape.checkpoint.state import Saved, StateReader, extras_of
from torchtitan_scape.optimizer.container import DenseOptimizers, ReplicaOptimizers, ScapeOptimizers
from torchtitan_scape.sync.scape.state import StateByParameter, for_moment
from torchtitan_scape.sync.shards import Shard, local, stored


@torch.no_grad()
def load_optimizer(optimizers: ReplicaOptimizers, reader: StateReader, exact: bool, step: int) -> str:
    """Takes the state of a checkpoint of SCAPE or of a dense method. A collective call, behind loading the model.

    exact: layout and options are those of the run that saved, as far as SCAPE's state depends on them.
    step: of the checkpoint. Returns what was done with the residual, in words.
    """
    if isinstance(optimizers, ScapeOptimizers):
        if reader.saved["method"] == "scape":
            return _scape_from_scape(optimizers, reader, exact)
        return _scape_from_dense(optimizers, reader, step)
    assert isinstance(optimizers, DenseOptimizers)
    return _dense(optimizers, reader)


class _Norm:
    """Root of the sum of squares over the model, of what all replicas have in common."""

    def __init__(self, optimizers: ReplicaOptimizers) -> None:
        self._collectives = optimizers.collectives
        self._sum = torch.zeros((), dtype=torch.float64, device=optimizers.grad_norm.device)

    def add(self, shard: Shard, values: Tensor) -> None:
        if shard.counted:
            self._sum += values.double().square().sum()

    def text(self) -> str:
        return f"{float(self._collectives.sum_over_model(self._sum.float()).sqrt()):.3g}"


def _scape_from_scape(optimizers: ScapeOptimizers, reader: StateReader, exact: bool) -> str:
    scape, saved, device = optimizers.scape, reader.saved["scape"], optimizers.grad_norm.device
    scape.settle()
    portable, norm = StateByParameter(scape), _Norm(optimizers)
    same_count = scape.collectives.replicas == reader.replicas
    # P keeps its density, by which the host knows that it is no mask of all ones.
    portable.put_record(saved, list(saved["densities"]) if exact else [1.0, saved["densities"][1]])
    for i, shard, read in reader:
        held = None if read.held is None else read.held.to(device)
        if i < portable.sparsified:
            for mask, bits in ((scape.masks.in_use, read.used), (scape.masks.previous, held)):
                portable.put_mask(i, torch.ones(shard.size, dtype=torch.bool) if bits is None else bits, mask)
        moment, own = _moment_and_own(read, shard, held, reader, optimizers)
        if not exact or own is None:
            moment, own = _shared(portable, i, reader, moment, own, held, same_count)
            norm.add(shard, _without(moment, held) if own is None else own.mean(0))
            if i >= portable.sparsified and held is not None:  # from now on sent whole: nothing is held back
                moment, own, held = _released(portable, i, moment, own, held), None, None
        portable.put(i, moment, own, held)
        _put_weights(portable, i, shard, read.master, read.weight if exact else None, reader, exact)
    if exact:
        # Rates of visits are none where the run that saved did not need them: they are learned in a few steps.
        reader.fill({key: values for key, values in extras_of(portable).items() if reader.has(key)})
        portable.learned_extras()
    if reader.saved["residual"] == "drop":
        told = "residuals were not saved and are lost"
    elif reader.saved["residual"] == "mean":
        told = f"every replica starts from the mean of the residuals, as it was saved (norm {norm.text()})"
    elif exact:
        return "state as it was"
    elif same_count:
        told = f"every replica keeps its residual (norm {norm.text()})"
    else:
        told = f"the mean of {reader.replicas} residuals is kept (norm {norm.text()})"
    return told if exact else f"{told}, the first moment copied, the next step is dense"


def _without(values: Tensor, held: Tensor | None) -> Tensor:
    """Of values (n,) or (rows, n) what lies off P."""
    return torch.zeros_like(values) if held is None else values.masked_fill(held, 0.0)


def _moment_and_own(
    read: Saved, shard: Shard, held: Tensor | None, reader: StateReader, optimizers: ReplicaOptimizers
) -> tuple[Tensor, Tensor | None]:
    """moment (n,) and residual (rows, n) on the device, told apart where they lay in one buffer. A collective call."""
    device = optimizers.grad_norm.device
    moment = None if read.moment is None else read.moment.to(device)
    own = None if read.residual is None else read.residual.to(device)
    if moment is None:
        # All rows have it.
        first = own[0] if own is not None and len(own) else torch.zeros(shard.size, device=device)
        moment = first.clone() if held is None else first.masked_fill(~held, 0.0)
    if own is not None and reader.saved["scape"]["one_buffer"]:
        if reader.replicas != optimizers.collectives.replicas:  # then some ranks read no row
            optimizers.collectives.broadcast_from_first([moment])
        own = _without(own, held)
    return moment, own


def _mean(own: Tensor, collectives: ReplicaCollectives, replicas: int) -> Tensor:
    """(n,): the mean of residuals (rows, n), of which every rank has some of `replicas`. A collective call."""
    total = own.sum(0)
    collectives.sum_over_replicas(total)
    return total.div_(replicas)


def _shared(
    portable: StateByParameter,
    i: int,
    reader: StateReader,
    moment: Tensor,
    own: Tensor | None,
    held: Tensor | None,
    same_count: bool,
) -> tuple[Tensor, Tensor | None]:
    """(moment, own residual (rows, n)) for a run that goes on from another layout, replicas equal."""
    if own is None:
        return moment, None  # saved as a mean, which lies in the moment off P
    if same_count and not reader.saved["scape"]["rounds"]:
        return moment, own
    mean = _mean(own, portable.scape.collectives, reader.replicas)
    # What rounding lost lies on P, where another layout has no place for it.
    lost = mean if held is None else mean.masked_fill(~held, 0.0)
    moment = portable.with_residual(i, moment, lost, held)
    if not same_count:
        own = mean.expand(portable.rows, -1).clone()
    return moment, _without(own, held)


def _released(portable: StateByParameter, i: int, moment: Tensor, own: Tensor | None, held: Tensor) -> Tensor:
    """The first moment (n,) with all residuals in it, of which replicas hold the mean."""
    residual = _without(moment, held)
    if own is not None:
        residual = residual + _mean(own, portable.scape.collectives, portable.scape.collectives.replicas)
    return portable.with_residual(i, moment.masked_fill(~held, 0.0), residual, None)


def _scape_from_dense(optimizers: ScapeOptimizers, reader: StateReader, step: int) -> str:
    scape, device = optimizers.scape, optimizers.grad_norm.device
    scape.settle()
    portable = StateByParameter(scape)
    steps = {"attempted_steps": step, "applied_steps": reader.applied_steps()}
    portable.put_record(steps, [1.0, 1.0])
    for i, shard, read in reader:
        assert read.moment is not None
        portable.put(i, read.moment.to(device), None, None)
        _put_weights(portable, i, shard, None, None, reader, exact=False)
    return "the first moment copied, no residual yet, the next step is dense"


def _put_weights(
    portable: StateByParameter,
    i: int,
    shard: Shard,
    master: Tensor | None,
    weight: Tensor | None,
    reader: StateReader,
    exact: bool,
) -> None:
    """Parameters in BF16, or with a master: what the model's part of a checkpoint cannot tell to the last bit."""
    if portable.has_master:
        portable.put_master(i, reader.model(shard) if master is None else master)
    own = local(shard.parameter).detach()
    if weight is not None:
        stored(shard.parameter).copy_(weight.view(own.shape))
    elif master is not None and not exact:
        own.copy_(master.view(own.shape))


def _pending(optimizers: DenseOptimizers, reader: StateReader) -> Iterator[tuple[Shard, Tensor, Tensor]]:
    """(shard, first moment, mean residual), FP32 (n,), of every parameter."""
    device = optimizers.grad_norm.device
    for _, shard, read in reader:
        held = None if read.held is None else read.held.to(device)
        moment, own = _moment_and_own(read, shard, held, reader, optimizers)
        residual = _without(moment, held) if reader.saved["method"] == "scape" else torch.zeros_like(moment)
        if own is not None:
            residual = residual + _mean(own, optimizers.collectives, reader.replicas)
        yield shard, moment if held is None else moment.masked_fill(~held, 0.0), residual


def _dense(optimizers: DenseOptimizers, reader: StateReader) -> str:
    optimizer, norm = optimizers.optimizers[0], _Norm(optimizers)
    optimizers.state_dict()  # makes the state of an optimizer that has taken no step
    for shard, moment, residual in _pending(optimizers, reader):
        norm.add(shard, residual)
        state, beta1 = optimizer.state[shard.parameter], optimizer.param_groups[shard.group]["betas"][0]
        moment += for_moment(residual, beta1)
        own = local(state["exp_avg"])
        own.copy_(moment.view(own.shape))
        if "exp_avg_sq" in state:
            # With this AdamW's next step is that of AdamS, whose normaliser is its moment.
            local(state["exp_avg_sq"]).copy_(own.square())
    steps = reader.applied_steps()
    for state in optimizer.state.values():
        state["step"].fill_(steps)
    if reader.saved["method"] != "scape":
        return "the first moment copied"
    if reader.saved["residual"] == "drop":
        return "the first moment copied; residuals were not saved and are lost"
    return f"the mean of the residuals (norm {norm.text()}) is flushed into the first moment"
