"""SCAPE's side of loading a checkpoint; `checkpoint.migration` states the rule.

Blocks, payloads and masks follow the layout. Under another layout the next step is dense and sends all that is pending.
Notation: P is the mask of the last step before the checkpoint; `held` is P by entry, None for all ones.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, local, stored
from torchtitan_scape.methods.imported import CheckpointReader, ImportedState, SavedValues
from torchtitan_scape.methods.scape.components import ScapeComponents
from torchtitan_scape.methods.scape.state import StateByParameter


class ImportedScapeState(ImportedState):
    """A parameter's state as SCAPE saved it.

    Attributes:
        moment: FP32 (n,): the first moment on P; elsewhere the part of the residual that replicas share.
        own: FP32 (rows, n): the replicas' residuals, in units of the first moment; None if they were not saved.
        held: Bool (n,), or None for all ones.
    """

    def __init__(self, kinds: dict[str, Tensor], reader: CheckpointReader, device: torch.device) -> None:
        super().__init__(kinds)
        self.reader, saved, mask = reader, reader.saved["scape"], kinds.get("mask")
        self.held = None if mask is None or saved["densities"][1] == 1.0 else (mask > 1).to(device)
        own = kinds["residual"].to(device) if "residual" in kinds else None
        if "moment" in kinds:
            moment = kinds["moment"].to(device)
        else:  # every row contains it
            assert own is not None
            row = own[0] if len(own) else torch.zeros(own.shape[1], dtype=torch.float32, device=device)
            moment = row.clone() if self.held is None else row.masked_fill(~self.held, 0.0)
        if own is not None and saved["one_buffer"]:
            reader.broadcast_if_replica_counts_differ(moment)
            own = off_mask(own, self.held)
        self.moment, self.own = moment, own
        if "master" in kinds:  # the saved model is in BF16
            self.weights = SavedValues(reader, None, kinds["master"].to(device))

    @cached_property
    def exp_avg(self) -> SavedValues:  # type: ignore[override]
        return SavedValues(self.reader, None, on_mask(self.moment, self.held))

    @cached_property
    def pending(self) -> SavedValues:  # type: ignore[override]
        """The residual in mean units of gradients: SCAPE stores (1 - beta1) times that."""
        units = 1.0 - float(self.reader.saved["betas"][0])
        own = None if self.own is None else self.own / units
        return SavedValues(self.reader, own, off_mask(self.moment, self.held) / units)


def import_scape_state(
    kinds: dict[str, Tensor], reader: CheckpointReader, device: torch.device, decode: Any = None
) -> ImportedState:
    """Interpret what SCAPE saved. Collective. See `methods.imported.import_state`."""
    return ImportedScapeState(kinds, reader, device)


class ScapeImport:
    """Loads a checkpoint into one replica's SCAPE.

    Args:
        same_layout: Method, layout and options are those of the run that saved, as far as the state depends on them.
    """

    def __init__(self, scape: ScapeComponents, reader: CheckpointReader, same_layout: bool, step: int) -> None:
        self.state, self.reader, self.same_layout = StateByParameter(scape), reader, same_layout
        saved: dict[str, Any] | None = reader.saved.get("scape")
        if saved is None:
            counters = {"attempted_steps": step, "applied_steps": reader.applied_steps()}
            self.state.put_record(counters, [1.0, 1.0])
        else:
            # P keeps its density: the host concludes from it that the mask is not all ones.
            self.state.put_record(saved, list(saved["densities"]) if same_layout else [1.0, saved["densities"][1]])

    def parameter(self, shard: Shard, imported: ImportedState, row: int) -> bool:
        """Load one parameter into this process's replica `row`. Collective.

        Returns:
            Whether pending gradients were added to the first moment.
        """
        if isinstance(imported, ImportedScapeState):
            self._from_scape(shard, imported, row)
            return False
        self._from_another_method(shard, imported)
        return imported.pending is not None

    def finish(self) -> None:
        """Load the tensors that only the same layout can use. Collective.

        Some may be missing: rates of visits that the saving run did not need are learned again within a few steps.
        """
        if self.same_layout:
            self.reader.fill_of_this_shard(self.state.layout_states())
            self.state.learned_extras()

    def _from_another_method(self, shard: Shard, imported: ImportedState) -> None:
        """Pending gradients of other methods are added to the first moment."""
        state, i = self.state, self.state.names.index(shard.name)
        if imported.exp_avg is None:
            moment = torch.zeros(shard.size, dtype=torch.float32, device=state.passes.device)
        else:
            moment = imported.exp_avg.mean
        if imported.pending is not None:
            moment = state.with_residual(i, moment, imported.pending.mean * (1.0 - state.beta1(i)), None)
        state.put(i, moment, None, None)
        self._put_weights(i, shard, None, imported.mean_weights())

    def _from_scape(self, shard: Shard, imported: ImportedScapeState, row: int) -> None:
        state, i, kinds = self.state, self.state.names.index(shard.name), imported.kinds
        moment, own, held = imported.moment, imported.own, imported.held
        if i < state.sparsified:
            mask = kinds.get("mask")
            used = None if mask is None else mask % 2 > 0
            for target, bits in ((state.masks.in_use, used), (state.masks.previous, held)):
                entries = torch.ones(shard.size, dtype=torch.bool, device="cpu") if bits is None else bits
                state.put_mask(i, entries, target)
        if not self.same_layout or own is None:
            moment, own = self._for_another_layout(i, moment, own, held)
            if i >= state.sparsified and held is not None:  # dense from now on: it keeps no residual
                moment, own, held = self._without_residual(i, moment, own, held), None, None
        state.put(i, moment, None if own is None else own[row].clone(), held)
        self._put_weights(i, shard, kinds.get("weight") if self.same_layout else None, kinds.get("master"))

    def _for_another_layout(
        self, i: int, moment: Tensor, own: Tensor | None, held: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (moment, own residuals (rows, n)) for a run that continues from another layout."""
        reader = self.reader
        if own is None:
            return moment, None  # saved as a mean, which the moment contains off P
        if reader.same_count and not reader.saved["scape"]["rounds"]:
            return moment, own
        mean = reader.mean(own)
        # Rounding errors of the payload are on P, where another layout stores no residual.
        moment = self.state.with_residual(i, moment, on_mask(mean, held), held)
        if not reader.same_count:
            own = mean.expand(reader.simulated, -1).clone()
        return moment, off_mask(own, held)

    def _without_residual(self, i: int, moment: Tensor, own: Tensor | None, held: Tensor) -> Tensor:
        """Return the first moment (n,) with the mean of all residuals in it."""
        residual = off_mask(moment, held)
        if own is not None:
            residual = residual + self.reader.mean_of_this_run(own)
        return self.state.with_residual(i, on_mask(moment, held), residual, None)

    def _put_weights(self, i: int, shard: Shard, weight: Tensor | None, master: Tensor | None) -> None:
        """Load what the checkpoint's model does not determine to the last bit: BF16 weights, and FP32 masters."""
        if self.state.has_master:
            self.state.put_master(i, self.reader.model(shard) if master is None else master)
        own = local(shard.parameter).detach()
        if weight is not None:
            stored(shard.parameter).copy_(weight.view(own.shape))
        elif master is not None and not self.same_layout:
            own.copy_(master.view(own.shape))


def on_mask(values: Tensor, held: Tensor | None) -> Tensor:
    """Return values (n,) or (rows, n) with zeros off P."""
    return values if held is None else values.masked_fill(~held, 0.0)


def off_mask(values: Tensor, held: Tensor | None) -> Tensor:
    """Return values (n,) or (rows, n) with zeros on P."""
    return torch.zeros_like(values) if held is None else values.masked_fill(held, 0.0)
