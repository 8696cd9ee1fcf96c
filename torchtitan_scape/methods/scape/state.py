"""SCAPE's state by parameter, in the parameters' shapes, as checkpoints store it for any layout.

In memory the state has the order of blocks, slices and payloads, which depends on the layout. By parameter it consists
of these tensors, for every entry of a local shard:

    moment    FP32, replicated: the first moment on P, the mask of the last step. Outside P the part of the residual
              that all replicas share (of a sharded update, or the mean over replicas with `residual` = "mean").
    residual  FP32, per replica: the residual outside P, and on P the quantization error of the payload. If nothing is
              quantized and every replica stores the moment ("one buffer"), it contains the moment on P, and `moment`
              does not exist.
    mask      uint8, of sparsified parameters: 1 for the next mask (A), plus 2 for P.
    master    FP32 master weights, if the parameters are in BF16.
    weight    BF16, the stored numbers of scaled parameters.

Every step conserves applied + pending updates, with pending = b1 * moment + mean over replicas of the residuals.
`checkpoint.migration` states the rule of loading. Blocks, payloads and masks follow the layout: under another layout
the next step is dense and sends all that is pending. Notation: `held` is P by entry, bool (n,), or None for all ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, local, stored
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.methods.imported import CheckpointReader, ImportedState, SavedValues
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.scape.exchange import DelayedMasks


def before_decay(residual: Tensor, beta1: float) -> Tensor:
    """Return the increment of the first moment that the next step, which multiplies by b1, turns into `residual`.

    Zeros if b1 is 0.
    """
    return residual / beta1 if beta1 > 0.0 else torch.zeros_like(residual)


_KINDS: dict[str, dict[str, Any]] = {
    "moment": {"per_replica": False, "on_migration": "copy"},
    "residual": {"per_replica": True, "on_migration": "gradient"},
    "mask": {"per_replica": False, "on_migration": "rebuild"},
    "master": {"per_replica": False, "on_migration": "copy"},
    "weight": {"per_replica": False, "on_migration": "copy"},
}
_LAYOUT_KIND: dict[str, Any] = {"per_replica": False, "on_migration": "rebuild", "by_parameter": False}


class StateByParameter:
    """SCAPE's state by parameter. Parameters are numbered as in `scape.ordered`, sparsified ones first.

    Args:
        scape: The `ScapeMethod`, which imports this file.
    """

    def __init__(self, scape: Any) -> None:
        self.scape = scape
        self.passes: ScapePasses = scape.passes
        self.masks: DelayedMasks = scape.masks
        self.owner = self.passes.owner
        self.blocks: BlockLayout = self.passes.tensors
        self.rounds = self.passes.code_residual.numel() > 0
        self.names = [shard.name for shard in scape.ordered]
        self.sparsified = len(self.blocks.sizes)
        # The tensors of the passes that contain a parameter: (number, first entry, end).
        self.slices: list[list[tuple[int, int, int]]] = [[] for _ in self.names]
        for i, (parameter, start, end) in enumerate(self.passes.slices):
            self.slices[parameter].append((i, start, end))

    # ------------------------------------------------------------------------------------------- saving

    @property
    def one_buffer(self) -> bool:
        """Whether `residual` of an exact checkpoint contains the moment on P. It is then the state itself, no copy."""
        return self.owner is None and not self.rounds

    @torch.no_grad()
    def tensors(self, residual: str = "exact") -> dict[tuple[str, str], Tensor]:
        """Return all tensors by (kind, parameter's name), of local shape. Collective.

        Call `finish_previous_step` first. Some tensors are the state itself and change with the next step.

        Args:
            residual: "exact"; "mean", which adds the mean over replicas to `moment`; or "drop".
        """
        self.passes.finish()
        tensors: dict[tuple[str, str], Tensor] = {}
        for i, (name, shard) in enumerate(zip(self.names, self.scape.ordered, strict=True)):
            shape, held = local(shard.parameter).shape, self._held(i)
            if i < self.sparsified:
                tensors["mask", name] = self._mask_bytes(i, held).view(shape)
            if residual == "exact" and self.one_buffer:
                kind = "residual" if i < self.sparsified else "moment"
                tensors[kind, name] = self.passes.kept()[i].view(shape)
            else:
                moment, own = self._parts(i, held)
                if residual == "exact" and (i < self.sparsified or self.rounds):
                    tensors["residual", name] = own.view(shape).cpu()
                elif residual == "mean":
                    self.scape.collectives.sum_over_replicas(own)
                    own.div_(self.scape.collectives.replicas)
                    decayed = before_decay(own, self.beta1(i))
                    moment = moment + (decayed if held is None else torch.where(held, decayed, own))
                elif residual == "drop" and held is not None:
                    moment = torch.where(held, moment, 0.0)
                tensors["moment", name] = moment.view(shape).cpu()
            if (owner := self.owner) is not None and owner.scaled:
                master = self._assembled(i, partial(owner.share_of, owner.master))
                tensors["master", name] = master.view(shape).cpu()
                tensors["weight", name] = stored(shard.parameter)
        return tensors

    def moment_and_residual(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the first moment and this replica's residual, FP32 (n,). Collective."""
        self.passes.finish()
        i = self.names.index(name)
        held = self._held(i)
        moment, own = self._parts(i, held)
        if held is None:
            return moment, own
        # Outside P `moment` contains the shared part of the residual.
        return torch.where(held, moment, 0.0), own + torch.where(held, 0.0, moment)

    def states(self, residual: str) -> list[State]:
        """`tensors` and `layout_states` as what a method declares. A collective call."""
        kinds: dict[str, dict[str, Tensor]] = {}
        for (kind, name), values in self.tensors(residual).items():
            kinds.setdefault(kind, {})[name] = values
        return [State(kind, values, **_KINDS[kind]) for kind, values in kinds.items()] + self.layout_states()

    def layout_states(self) -> list[State]:
        """Return the tensors that only the same layout can use: visit rates, FP32, and weight scales, float64."""
        tensors = {} if self.passes.visits is None else {"visits": self.passes.visits.rates}
        if self.owner is not None and self.owner.scaled:
            tensors["scales"] = self.owner.scales
        return [State(kind, {"all": values}, **_LAYOUT_KIND) for kind, values in tensors.items()]

    def declared(self) -> list[State]:
        """Return all kinds of state that a checkpoint may contain, those by parameter without tensors."""
        return [State(kind, {}, **described) for kind, described in _KINDS.items()] + self.layout_states()

    def record(self) -> dict[str, Any]:
        """Return the state that is not a tensor, as plain values."""
        scape, masks = self.scape, self.masks
        return {
            "densities": [masks.in_use.density, masks.previous.density],
            "attempted_steps": scape.attempted_steps,
            "applied_steps": scape.applied_steps.item(),
        }

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        """Return the tensors that are equal on all replicas: parameters, scales, masks, visit rates.

        Call `finish_previous_step` first.
        """
        scape, passes, masks, owner = self.scape, self.passes, self.masks, self.owner
        visits, states = passes.visits, passes.kept()
        replicated = []
        for number, (shard, slices) in enumerate(zip(scape.ordered, self.slices, strict=True)):
            own = [tensor for tensor, _, _ in slices]
            parts: list[tuple[str | None, Tensor]] = [(None, stored(shard.parameter))]
            if owner is not None and owner.scaled:
                parts.append(("scale", owner.scales[own[0] : own[-1] + 1] if own else owner.scales[:0]))
            sparse = [tensor for tensor in own if tensor < passes.sparsified]
            for kind, mask in (("mask", masks.in_use), ("previous mask", masks.previous)):
                parts.append((kind, _bits_of(masks.layout, mask, sparse)))
            if visits and number < len(visits.rows):
                start, end, mean = visits.starts[2 * number], visits.starts[2 * number + 2], visits.starts[-1] + number
                parts += [("visit rates", visits.rates[start:end]), ("visit rates", visits.rates[mean : mean + 1])]
            # After `finish_previous_step` the moment is stored on the previous mask. With a sharded update the owner
            # stores it; this replica stores its residual, which is zero on that mask.
            held = [(tensor, masks.previous if tensor in sparse else None) for tensor in own]
            on_mask = [(states[i], masks.layout.bits(mask, i) if mask else None) for i, mask in held]
            replicated.append(ReplicatedTensors(shard.name, parts, on_mask))
        return [*replicated, ReplicatedTensors(None, [("count of applied steps", scape.applied_steps)])]

    def beta1(self, i: int) -> float:
        return float(self.scape.param_groups[self.scape.ordered[i].group]["betas"][0])

    # ------------------------------------------------------------------------------------------ loading

    @property
    def scaled(self) -> bool:
        """Whether weights are in BF16, with a scale and an FP32 master."""
        return self.owner is not None and self.owner.scaled

    def apply_layout_states(self) -> None:
        """Apply the loaded scales. Call it after loading the tensors of `layout_states`."""
        if self.owner is not None and self.owner.scaled:
            self.owner.load_scales(self.owner.scales)

    @torch.no_grad()
    def put_saved(self, i: int, kinds: dict[str, Tensor]) -> None:
        """Load a parameter's `tensors` by kind, of any shape, after `put_record`."""
        mask, held = kinds.get("mask"), None
        if mask is not None:
            mask = mask.reshape(-1)
            self.put_mask(i, mask % 2 > 0, self.masks.in_use)
            self.put_mask(i, mask > 1, self.masks.previous)
            held = None if self.masks.previous.dense else (mask > 1).to(self.passes.device)
        own = kinds["residual"].reshape(-1).to(self.passes.device) if "residual" in kinds else None
        if "moment" in kinds:
            moment = kinds["moment"].reshape(-1)
        else:  # one buffer, with the moment on P
            assert own is not None
            moment, own = on_mask(own, held), off_mask(own, held)
        self.put(i, moment, own, held)
        if "master" in kinds:
            self.put_master(i, kinds["master"].reshape(-1))
        if "weight" in kinds:
            weight = stored(self.scape.ordered[i].parameter)
            weight.copy_(kinds["weight"].view(weight.shape))

    @torch.no_grad()
    def put(self, i: int, moment: Tensor, own: Tensor | None, held: Tensor | None) -> None:
        """Load a parameter's state.

        Args:
            moment: FP32 (n,).
            own: This replica's residual, FP32 (n,); None for zeros. Its values on P become quantization errors, if P
                has the target density.
            held: Mask P, bool (n,); None for all ones.
        """
        device = self.passes.device
        moment = moment.to(device)
        if own is not None:
            own = own.to(device)
            self._put_code_residual(i, own, held)
            own = off_mask(own, held)
        kept = self.passes.kept()
        for number, start, end in self.slices[i]:
            part = torch.zeros_like(moment[start:end]) if own is None else own[start:end]
            if self.owner is None:
                kept[number].copy_(moment[start:end] + part)
                continue
            if i < self.sparsified:
                kept[number].copy_(part)
            if self.owner.owns(number):
                self.owner.share_of(self.owner.common, number).copy_(moment[start:end])

    @torch.no_grad()
    def put_master(self, i: int, values: Tensor) -> None:
        """Load a parameter's FP32 values (n,) into the master, if there is one, and as far as this rank stores it."""
        for number, start, end in self.slices[i]:
            if self.owner is not None and self.owner.scaled and self.owner.owns(number):
                self.owner.share_of(self.owner.master, number).copy_(values[start:end])

    @torch.no_grad()
    def put_mask(self, i: int, bits: Tensor, mask: Mask) -> None:
        """Load the bits of a sparsified parameter, bool (n,), into a mask."""
        size = self.blocks.blocks[i] * self.blocks.block_size
        padded = torch.zeros(size, dtype=torch.bool, device=mask.bits.device)
        padded[: bits.numel()] = bits
        first = self.blocks.first_block[i] * self.blocks.block_size // 8
        mask.bits[first : first + size // 8] = reference.pack_bits(padded)

    def put_record(self, saved: dict[str, Any]) -> None:
        """Load the result of `record`: counters, and the densities of A and P."""
        densities = saved["densities"]
        self.masks.in_use.density, self.masks.previous.density = densities[0], densities[1]
        self.passes.code_residual.zero_()
        self.scape.attempted_steps = saved["attempted_steps"]
        self.scape.applied_steps.fill_(saved["applied_steps"])

    # ---------------------------------------------------------------------------------------- internals

    @property
    def _has_code_residual(self) -> bool:
        """Whether the last step left quantization errors on P.

        There are none before a dense step: they were released, or P comes from another layout and has another number of
        entries than its density implies.
        """
        return self.rounds and not self.masks.in_use.dense and self.passes.at_target(self.masks.previous)

    def _held(self, i: int) -> Tensor | None:
        return self._bits(i, self.masks.previous)

    def _bits(self, i: int, mask: Mask) -> Tensor | None:
        """Return the bits of a parameter in a mask, bool (n,); None for all ones."""
        bits = self.blocks.bits(mask, i) if i < self.sparsified else None
        return None if bits is None else reference.unpack_bits(bits, self.blocks.sizes[i])

    def _mask_bytes(self, i: int, held: Tensor | None) -> Tensor:
        used, ones = self._bits(i, self.masks.in_use), torch.ones(self.blocks.sizes[i], dtype=torch.uint8, device="cpu")
        first = ones if used is None else used.to(torch.uint8).cpu()
        return first + 2 * (ones if held is None else held.to(torch.uint8).cpu())

    def _parts(self, i: int, held: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the moment and this replica's residual, FP32 (n,), as new tensors on the device."""
        kept, size, device = self.passes.kept(), self.scape.ordered[i].size, self.passes.device
        if (owner := self.owner) is None:
            state = kept[i].to(device)
            if held is None:
                moment, own = state.clone(), torch.zeros_like(state)
            else:
                moment, own = torch.where(held, state, 0.0), torch.where(held, 0.0, state)
        else:
            own = torch.zeros(size, dtype=torch.float32, device=device)
            for number, start, end in self.slices[i] if i < self.sparsified else ():
                own[start:end] = kept[number]
            moment = self._assembled(i, partial(owner.share_of, owner.common))
        if self._has_code_residual:
            for number, start, end in self.slices[i]:
                where = self._where(held, start, end)
                own[start:end][where] = self.passes.code_residual_of(number)
        return moment, own

    def _assembled(self, i: int, part_of: Callable[[int], Tensor]) -> Tensor:
        """Return a parameter on every replica from the slices of its owners. Collective."""
        whole = torch.zeros(self.scape.ordered[i].size, dtype=torch.float32, device=self.passes.device)
        for number, start, end in self.slices[i]:
            if self.owner is not None and self.owner.owns(number):
                whole[start:end] = part_of(number)
        # A sum of the bits as integers is exact: only one summand is not zero.
        self.scape.collectives.sum_over_replicas(whole.view(torch.int32))
        return whole

    def _where(self, held: Tensor | None, start: int, end: int) -> Any:
        return slice(None) if held is None else held[start:end].nonzero().view(-1)

    def _put_code_residual(self, i: int, own: Tensor, held: Tensor | None) -> None:
        if self._has_code_residual:
            for number, start, end in self.slices[i]:
                errors = self.passes.code_residual_of(number)
                errors.copy_(own[start:end][self._where(held, start, end)])

    @torch.no_grad()
    def release_code_residual(self) -> None:
        """Add the quantization errors to the first moment, for a step whose payload cannot contain them. Collective."""
        if not self._has_code_residual:
            return
        errors, replicas = self.passes.code_residual, self.scape.collectives.replicas
        self.scape.collectives.sum_over_replicas(errors)
        errors.div_(replicas)
        kept = self.passes.kept()
        for i in range(len(self.names)):
            held = self._held(i)
            for number, start, end in self.slices[i]:
                where = self._where(held, start, end)
                increment = before_decay(self.passes.code_residual_of(number), self.beta1(i))
                if self.owner is None:
                    state = kept[number]  # on the host if it is offloaded
                    where = where.to(state.device) if isinstance(where, Tensor) else where
                    state[where] += increment.to(state.device)
                elif self.owner.owns(number):
                    self.owner.share_of(self.owner.common, number)[where] += increment
        errors.zero_()


# ------------------------------------------------------------------------------------- loading a checkpoint


def import_scape_state(
    kinds: dict[str, Tensor], reader: CheckpointReader, device: torch.device, decode: Any = None
) -> ImportedState:
    """Interpret what SCAPE saved. See `methods.imported.import_state`."""
    imported, mask = ImportedState(kinds), kinds.get("mask")
    held = None if mask is None or reader.saved["scape"]["densities"][1] == 1.0 else (mask > 1).to(device)
    own = kinds["residual"].to(device) if "residual" in kinds else None
    units = 1.0 - float(reader.saved["betas"][0])  # the residual is (1 - b1) times the pending gradients
    if "moment" in kinds:
        moment = kinds["moment"].to(device)
        imported.exp_avg = SavedValues(reader, None, on_mask(moment, held))
        imported.pending = SavedValues(reader, None if own is None else own / units, off_mask(moment, held) / units)
    else:  # one buffer: on P the replicas' rows have the moment
        assert own is not None
        imported.exp_avg = SavedValues(reader, on_mask(own, held))
        imported.pending = SavedValues(reader, off_mask(own, held) / units)
    if "master" in kinds:  # the saved model is in BF16
        imported.weights = SavedValues(reader, None, kinds["master"].to(device))
    return imported


class ScapeImport:
    """Loads a checkpoint into one replica's SCAPE.

    Args:
        same_layout: Method, layout and options are those of the run that saved, as far as the state depends on them.
            Otherwise the next step is dense, and sends the pending gradients of all replicas as part of the moment.
    """

    def __init__(self, state: StateByParameter, reader: CheckpointReader, same_layout: bool) -> None:
        self.state, self.reader, self.same_layout = state, reader, same_layout
        if same_layout:
            state.put_record(reader.saved["scape"])
        else:
            counters = {"attempted_steps": reader.saved["attempted_steps"], "applied_steps": reader.applied_steps()}
            state.put_record({"densities": [1.0, 1.0]} | counters)

    def parameter(self, shard: Shard, imported: ImportedState, row: int) -> bool:
        """Load one parameter into this process's replica `row`. Collective.

        Returns:
            Whether pending gradients were added to the first moment.
        """
        state, i, kinds = self.state, self.state.names.index(shard.name), imported.kinds
        if self.same_layout:
            state.put_saved(i, kinds | ({"residual": kinds["residual"][row]} if "residual" in kinds else {}))
            return False
        if imported.exp_avg is None:
            moment = torch.zeros(shard.size, dtype=torch.float32, device=state.passes.device)
        else:
            moment = imported.exp_avg.mean
        if imported.pending is not None:
            residual = imported.pending.mean * (1.0 - state.beta1(i))
            moment = moment + before_decay(residual, state.beta1(i))
        state.put(i, moment, None, None)
        weights = imported.mean_weights()
        if state.scaled:
            state.put_master(i, self.reader.model(shard) if weights is None else weights)
        if weights is not None:
            own = local(shard.parameter).detach()
            own.copy_(weights.view(own.shape))
        return imported.pending is not None

    def finish(self) -> None:
        """Load the tensors that only the same layout can use. Collective.

        Some may be missing: rates of visits that the saving run did not need are learned again within a few steps.
        """
        if self.same_layout:
            self.reader.fill_of_this_shard(self.state.layout_states())
            self.state.apply_layout_states()


def on_mask(values: Tensor, held: Tensor | None) -> Tensor:
    """Return values (n,) or (rows, n) with zeros off P."""
    return values if held is None else values.masked_fill(~held, 0.0)


def off_mask(values: Tensor, held: Tensor | None) -> Tensor:
    """Return values (n,) or (rows, n) with zeros on P."""
    return torch.zeros_like(values) if held is None else values.masked_fill(held, 0.0)


def _bits_of(layout: BlockLayout, mask: Mask, tensors: list[int]) -> Tensor:
    """Return the packed bits of consecutive tensors; empty for a mask of all ones."""
    if mask.dense or not tensors:
        return mask.bits[:0]
    first, end = layout.first_block[tensors[0]], layout.first_block[tensors[-1]] + layout.blocks[tensors[-1]]
    return mask.bits[first * layout.block_size // 8 : end * layout.block_size // 8]
