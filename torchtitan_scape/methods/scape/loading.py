"""How SCAPE takes a checkpoint's state, and what it says of its own to other methods; `optimizer.loading` has the rule.

Blocks, runs and masks follow the layout. Under another one, the next step is dense and sends all that is pending.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, local, stored
from torchtitan_scape.methods.pending import CheckpointReader, ImportedState, NormAccumulator, import_state
from torchtitan_scape.methods.scape.components import ScapeComponents
from torchtitan_scape.methods.scape.state import StateByParameter


def import_scape_state(kinds: dict[str, Tensor], reader: CheckpointReader, device: torch.device) -> ImportedState:
    """A parameter's state as SCAPE has saved it, for any method. A collective call.

    SCAPE's residual is in units of the first moment, (1 - b1) times a gradient.
    """
    moment, own, held = _told_apart(kinds, reader, device)
    units = 1.0 - float(reader.saved["betas"][0])
    common = _without(moment, held) / units
    return ImportedState(
        moment if held is None else moment.masked_fill(~held, 0.0), None if own is None else own / units, common
    )


@torch.no_grad()
def load_scape(each: Sequence[ScapeComponents], reader: CheckpointReader, same_layout: bool, step: int) -> str:
    """Takes a checkpoint's state into the optimizers of this process's replicas, settled. A collective call.

    as_it_lies: method, layout and options are those of the run that saved, as far as the state depends on them.
    step: of the checkpoint. Returns what was done with the residual, in words.
    """
    states = [StateByParameter(scape) for scape in each]
    if "scape" not in reader.saved:
        return _from_another_method(states, reader, step)
    first, saved = states[0], reader.saved["scape"]
    device = first.passes.device
    norm = NormAccumulator(first.scape.collectives, device)
    for state in states:
        # P keeps its density, by which the host knows that it is no mask of all ones.
        state.put_record(saved, list(saved["densities"]) if same_layout else [1.0, saved["densities"][1]])
    for _, shard, kinds in reader:
        i = first.names.index(shard.name)
        moment, own, held = _told_apart(kinds, reader, device)
        if i < first.sparsified:
            for state in states:
                _put_masks(state, i, shard, kinds.get("mask"), held)
        if not same_layout or own is None:
            moment, own = _for_another_layout(first, i, reader, moment, own, held)
            norm.add(shard, _without(moment, held) if own is None else own.mean(0))
            if i >= first.sparsified and held is not None:  # from now on sent whole: nothing is held back
                moment, own, held = _released(first, i, moment, own, held, reader), None, None
        for replica, state in enumerate(states):
            state.put(i, moment, None if own is None else own[replica].clone(), held)
            _put_weights(state, i, shard, kinds, reader, same_layout)
    if same_layout:
        # Rates of visits are none where the run that saved did not need them: they are learned in a few steps.
        of_shard = [s for s in first.states("drop") if not s.by_parameter]
        reader.fill_of_this_shard(of_shard)
        for state in states:
            for kind, values in state.extras().items():
                values.copy_(first.extras()[kind])
            state.learned_extras()
    return _summary(reader, same_layout, norm)


def _summary(reader: CheckpointReader, same_layout: bool, norm: NormAccumulator) -> str:
    if reader.saved["residual"] == "drop":
        migration_summary = "residuals were not saved and are lost"
    elif reader.saved["residual"] == "mean":
        migration_summary = f"every replica starts from the mean of the residuals, as it was saved (norm {norm.text()})"
    elif same_layout:
        return "state as it was"
    elif reader.same_count:
        migration_summary = f"every replica keeps its residual (norm {norm.text()})"
    else:
        migration_summary = f"the mean of {reader.replicas} residuals is kept (norm {norm.text()})"
    return migration_summary if same_layout else f"{migration_summary}, the first moment copied, the next step is dense"


def _from_another_method(states: Sequence[StateByParameter], reader: CheckpointReader, step: int) -> str:
    first, device = states[0], states[0].passes.device
    norm, pending = NormAccumulator(first.scape.collectives, device), False
    for state in states:
        state.put_record({"attempted_steps": step, "applied_steps": reader.applied_steps()}, [1.0, 1.0])
    for _, shard, kinds in reader:
        i = first.names.index(shard.name)
        beta1 = first.beta1(i)
        found = import_state(kinds, reader, device)
        mean = found.mean(reader)
        moment = torch.zeros(shard.size, device=device) if found.moment is None else found.moment
        if mean is not None:
            pending = True
            norm.add(shard, mean)
            moment = first.with_residual(i, moment, mean * (1.0 - beta1), None)
        for state in states:
            state.put(i, moment, None, None)
            master = {} if found.parameter is None else {"master": found.parameter}
            _put_weights(state, i, shard, master, reader, same_layout=False)
    if pending:
        return f"the first moment copied, the mean of the residuals (norm {norm.text()}) in it, the next step is dense"
    return "the first moment copied, no residual yet, the next step is dense"


def _told_apart(
    kinds: dict[str, Tensor], reader: CheckpointReader, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(moment (n,), own residual (rows, n) or None, P bool (n,) or None for all ones), from what lay in one buffer."""
    saved, mask = reader.saved["scape"], kinds.get("mask")
    held = None if mask is None or saved["densities"][1] == 1.0 else (mask > 1).to(device)
    own = kinds["residual"].to(device) if "residual" in kinds else None
    if "moment" in kinds:
        moment = kinds["moment"].to(device)
    else:  # all rows have it
        assert own is not None
        row = own[0] if len(own) else torch.zeros(own.shape[1], device=device)
        moment = row.clone() if held is None else row.masked_fill(~held, 0.0)
    if own is not None and saved["one_buffer"]:
        reader.from_a_rank_that_has_rows(moment)
        own = _without(own, held)
    return moment, own, held


def _without(values: Tensor, held: Tensor | None) -> Tensor:
    """Of values (n,) or (rows, n) what lies off P."""
    return torch.zeros_like(values) if held is None else values.masked_fill(held, 0.0)


def _put_masks(state: StateByParameter, i: int, shard: Shard, mask: Tensor | None, held: Tensor | None) -> None:
    used = None if mask is None else mask % 2 > 0
    for into, bits in ((state.masks.in_use, used), (state.masks.previous, held)):
        state.put_mask(i, torch.ones(shard.size, dtype=torch.bool) if bits is None else bits, into)


def _for_another_layout(
    state: StateByParameter, i: int, reader: CheckpointReader, moment: Tensor, own: Tensor | None, held: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(moment, own residual (rows, n)) for a run that goes on from another layout, replicas equal."""
    if own is None:
        return moment, None  # saved as a mean, which lies in the moment off P
    if reader.same_count and not reader.saved["scape"]["rounds"]:
        return moment, own
    mean = reader.mean(own)
    # What rounding lost lies on P, where another layout has no place for it.
    lost = mean if held is None else mean.masked_fill(~held, 0.0)
    moment = state.with_residual(i, moment, lost, held)
    if not reader.same_count:
        own = mean.expand(reader.simulated, -1).clone()
    return moment, _without(own, held)


def _released(
    state: StateByParameter, i: int, moment: Tensor, own: Tensor | None, held: Tensor, reader: CheckpointReader
) -> Tensor:
    """The first moment (n,) with all residuals in it, of which replicas hold the mean."""
    residual = _without(moment, held)
    if own is not None:
        residual = residual + reader.mean_of_this_run(own)
    return state.with_residual(i, moment.masked_fill(~held, 0.0), residual, None)


def _put_weights(
    state: StateByParameter, i: int, shard: Shard, kinds: dict[str, Tensor], reader: CheckpointReader, same_layout: bool
) -> None:
    """Parameters in BF16, or with a master: what the model's part of a checkpoint cannot tell to the last bit."""
    master, weight = kinds.get("master"), kinds.get("weight") if same_layout else None
    if state.has_master:
        state.put_master(i, reader.model(shard) if master is None else master)
    own = local(shard.parameter).detach()
    if weight is not None:
        stored(shard.parameter).copy_(weight.view(own.shape))
    elif master is not None and not same_layout:
        own.copy_(master.view(own.shape))
