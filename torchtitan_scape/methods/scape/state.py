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
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

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
    "visits": {"per_replica": False, "on_migration": "rebuild", "by_parameter": False},
    "scales": {"per_replica": False, "on_migration": "rebuild", "by_parameter": False},
}


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
                    moment = self.with_residual(i, moment, own.div_(self.scape.collectives.replicas), held)
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
        """`tensors` and `extras` as what a method declares. A collective call."""
        kinds: dict[str, dict[str, Tensor]] = {}
        for (kind, name), values in self.tensors(residual).items():
            kinds.setdefault(kind, {})[name] = values
        return [State(kind, values, **_KINDS[kind]) for kind, values in kinds.items()] + self.layout_states()

    def layout_states(self) -> list[State]:
        """Return the tensors that only the same layout can use. No communication."""
        return [State(kind, {"all": values}, **_KINDS[kind]) for kind, values in self.extras().items()]

    def declared(self) -> list[State]:
        """Return all kinds of state that a checkpoint may contain, those by parameter without tensors."""
        of_shard = {kind: {"all": values} for kind, values in self.extras().items()}
        return [State(kind, of_shard.get(kind, {}), **what) for kind, what in _KINDS.items()]

    def sizes(self, residual: str) -> dict[str, int]:
        """Return the bytes of `tensors` in a checkpoint by kind, over all ranks."""
        counts = [shard.entries for shard in self.scape.ordered]
        every, sparse = sum(counts), sum(counts[: self.sparsified])
        rows = self.scape.collectives.replicas if residual == "exact" else 0
        in_one = residual == "exact" and self.one_buffer
        sizes = {
            "moment": 4 * (every - sparse if in_one else every),
            "residual": 4 * rows * (every if self.rounds else sparse),
            "mask": sparse,
            "master": 4 * every if self.scaled else 0,
            "weight": 2 * every if self.scaled else 0,
        }
        return {kind: size for kind, size in sizes.items() if size}

    def extras(self) -> dict[str, Tensor]:
        """Return the tensors that only the same layout can use: visit rates, FP32, and weight scales, float64."""
        extras = {} if self.passes.visits is None else {"visits": self.passes.visits.rates}
        return extras | {"scales": self.owner.scales} if self.owner is not None and self.owner.scaled else extras

    def record(self) -> dict[str, Any]:
        """Return the state that is not a tensor, as plain values."""
        scape, masks = self.scape, self.masks
        return {
            "densities": [masks.in_use.density, masks.previous.density],
            "attempted_steps": scape.attempted_steps,
            "applied_steps": scape.applied_steps.item(),
            "one_buffer": self.one_buffer,
            "rounds": self.rounds,
        }

    def with_residual(self, i: int, moment: Tensor, residual: Tensor, held: Tensor | None) -> Tensor:
        """Return the first moment plus a residual that all replicas share, FP32 (n,).

        On P the residual is divided by b1, because the next step multiplies the moment by b1: pending = b1 * moment +
        residual does not change.
        """
        into = before_decay(residual, self.beta1(i))
        return moment + (into if held is None else torch.where(held, into, residual))

    def beta1(self, i: int) -> float:
        return float(self.scape.param_groups[self.scape.ordered[i].group]["betas"][0])

    # ------------------------------------------------------------------------------------------ loading

    @property
    def scaled(self) -> bool:
        """Whether weights are in BF16, with a scale and an FP32 master."""
        return self.owner is not None and self.owner.scaled

    def learned_extras(self) -> None:
        """Apply the loaded scales. Call it after loading the tensors of `extras`."""
        if self.owner is not None and self.owner.scaled:
            self.owner.load_scales(self.owner.scales)

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
            own = torch.zeros_like(own) if held is None else own.masked_fill_(held, 0.0)
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

    def put_record(self, saved: dict[str, Any], densities: list[float]) -> None:
        """Load the counters of `record`, and the densities of A and P."""
        self.masks.in_use.density, self.masks.previous.density = densities[0], densities[1]
        self.passes.code_residual.zero_()
        self.scape.attempted_steps = saved["attempted_steps"]
        self.scape.applied_steps.fill_(saved["applied_steps"])

    # ------------------------------------------------------------------------------- the same layout again

    def whole(self) -> dict[str, Any]:
        """Return this replica's complete state without the parameters. Collective.

        Call `finish_previous_step` first.
        """
        return {
            "tensors": {f"{kind}.{name}": values for (kind, name), values in self.tensors().items()},
            "extras": self.extras(),
            "record": self.record(),
        }

    @torch.no_grad()
    def put_whole(self, saved: dict[str, Any]) -> None:
        """Load the result of `whole`."""
        self.passes.finish()
        self.put_record(saved["record"], saved["record"]["densities"])
        for i, name in enumerate(self.names):
            flat = {k: saved["tensors"].get(f"{k}.{name}") for k in ("moment", "residual", "mask", "master", "weight")}
            held, own = None, flat["residual"]
            if flat["mask"] is not None:
                bits = flat["mask"].view(-1)
                self.put_mask(i, bits % 2 > 0, self.masks.in_use)
                self.put_mask(i, bits > 1, self.masks.previous)
                held = None if self.masks.previous.dense else (bits > 1).to(self.passes.device)
            if own is not None:
                own = own.reshape(-1).to(self.passes.device)
            moment = flat["moment"]
            if moment is None:  # one buffer, with the moment on P
                assert own is not None
                moment = own if held is None else own.masked_fill(~held, 0.0)
                own = torch.zeros_like(own) if held is None else own.masked_fill(held, 0.0)
            self.put(i, moment.reshape(-1), own, held)
            if flat["master"] is not None:
                self.put_master(i, flat["master"].view(-1))
            if flat["weight"] is not None:
                weight = stored(self.scape.ordered[i].parameter)
                weight.copy_(flat["weight"].view(weight.shape))
        for kind, values in self.extras().items():
            values.copy_(saved["extras"][kind])
        self.learned_extras()

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

    def __init__(self, state: StateByParameter, reader: CheckpointReader, same_layout: bool, step: int) -> None:
        self.state, self.reader, self.same_layout = state, reader, same_layout
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
        if self.state.scaled:
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
