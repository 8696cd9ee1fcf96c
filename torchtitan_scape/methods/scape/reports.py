"""What SCAPE reports: metrics of a step, synchronized gradients for an observer, and tensors that replicas share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.observer import Observer
from torchtitan_scape.core.parameters import Shard, stored
from torchtitan_scape.core.tensors import sum_of_squares
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.step import PayloadChunk
from torchtitan_scape.methods.scape.exchange import PayloadExchange
from torchtitan_scape.methods.scape.state import StateByParameter


def metrics(scape: Any, local: bool) -> dict[str, float]:
    """Return the metrics of the last step, see `ScapeMethod.metrics`. Collective unless `local`."""
    masks, layout = scape.masks, scape.masks.layout
    in_use, previous = masks.moment_masks(scape.last_applied)
    sums = torch.zeros(4, dtype=torch.float64, device=scape.applied_steps.device)
    kept = scape.passes.kept()
    for i, size in enumerate(layout.sizes):
        if not scape.shard_of(i).counted:
            continue
        used, before = (_unpacked(layout.bits(mask, i), size, sums.device) for mask in (in_use, previous))
        residual = kept[i].to(sums.device).masked_fill(used, 0.0)
        entries = torch.tensor(float(size), dtype=torch.float64, device=sums.device)
        sums += torch.stack(
            [entries, used.sum().double(), (used & before).sum().double(), sum_of_squares(residual)],
        )
    total, nnz, common, squares = scape.mean_over_replicas(sums, local).tolist()
    return {
        "density": nnz / total if total else 1.0,
        "nnz": nnz,
        "mask_overlap": common / nnz if nnz else 1.0,
        "residual_norm": squares**0.5,
    }


def _unpacked(bits: Tensor | None, count: int, device: torch.device) -> Tensor:
    if bits is None:
        return torch.ones(count, dtype=torch.bool, device=device)
    return reference.unpack_bits(bits, count)


class GradientRecorder:
    """Collects the synchronized gradient gh of the observed parameters in a step: on mask A, NaN outside it."""

    def __init__(
        self, passes: ScapePasses, exchange: PayloadExchange, ordered: Sequence[Shard], observer: Observer
    ) -> None:
        self._passes, self._exchange, self._ordered, self._observer = passes, exchange, ordered, observer
        self._gradients: dict[str, Tensor] = {}

    def add(self, chunk: PayloadChunk) -> None:
        """Collect the gradients of a chunk. Call it after the mean was received, before the norm is computed."""
        owner = self._passes.owner
        for tensor in range(chunk.first, chunk.end):
            number, start, end = self._passes.slices[tensor]
            shard = self._ordered[number]
            if shard.name not in self._observer.names:
                continue
            # Zeros in the slices of other owners, because `_assembled` sums the bits over replicas.
            zeros = torch.zeros(shard.size, dtype=torch.float32, device=shard.device)
            gradient = self._gradients.setdefault(shard.name, zeros)
            if owner is None or owner.owns(tensor):
                gradient[start:end] = self._on_mask(tensor)

    def finish(self) -> None:
        """Pass the gradients to the observer after the last chunk. Collective."""
        self._observer.synchronized(self._assembled, self._passes.step.applied)

    def _assembled(self, name: str) -> Tensor:
        gradient = self._gradients[name]
        if self._passes.owner is not None:
            self._exchange.collectives.sum_over_replicas(gradient.view(torch.int32))
        return gradient

    def _on_mask(self, tensor: int) -> Tensor:
        """Return gh = (b - b1 q) / (1 - b1) of a tensor, FP32 (n,), NaN outside mask A.

        b is the received mean, q the previous first moment on A, b1 is beta1 (SCAPE paper, Algorithm 1).
        """
        passes, step, owner = self._passes, self._passes.step, self._passes.owner
        beta1, size, count = step.rates[tensor].beta1, passes.sizes[tensor], passes.counts[tensor]
        masks = (step.in_use, step.previous) if tensor < passes.sparsified else ()
        used, held = [passes.layout.bits(mask, tensor) for mask in masks] or (None, None)
        indices = None if used is None else reference.mask_indices(used, size, count)
        payload = self._payload(tensor)
        if owner is not None:
            _, released = reference.owned_moment(owner.share_of(owner.common, tensor), indices, held)
            reference.owned_gradient_(payload, released, beta1)
        else:
            if passes.compact:
                last = passes.moment_on_mask[passes.payload_layout.positions[tensor] :][:count]
            else:
                state = passes.kept()[tensor].to(payload.device)
                last = state if indices is None else state.index_select(0, indices)
            reference.synchronized_gradient_(payload, last, beta1)
        if indices is None:
            return payload
        return torch.full((size,), torch.nan, dtype=torch.float32, device=payload.device).scatter_(0, indices, payload)

    def _payload(self, tensor: int) -> Tensor:
        """Return a copy of the received mean on mask A, FP32 (entries of A,)."""
        passes, count = self._passes, self._passes.counts[tensor]
        if passes.compact:
            return passes.payload[passes.payload_layout.positions[tensor] :][:count].clone()
        chunk = torch.empty(count, dtype=torch.float32, device=passes.device)
        if count:
            self._exchange.source().fill(chunk, sum(passes.counts[:tensor]))
        return chunk


def replicated_tensors(state: StateByParameter) -> list[ReplicatedTensors]:
    """Return the tensors that are equal on all replicas: parameters, scales, masks, visit rates.

    Call `finish_previous_step` first.
    """
    scape, passes, masks, owner = state.scape, state.passes, state.masks, state.owner
    visits, states = passes.visits, passes.kept()
    replicated = []
    for number, (shard, slices) in enumerate(zip(scape.ordered, state.slices, strict=True)):
        own = [tensor for tensor, _, _ in slices]
        parts: list[tuple[str | None, Tensor]] = [(None, stored(shard.parameter))]
        if owner is not None and owner.scaled:
            parts.append(("scale", owner.scales[own[0] : own[-1] + 1] if own else owner.scales[:0]))
        sparse = [tensor for tensor in own if tensor < passes.sparsified]
        for kind, mask in (("mask", masks.in_use), ("previous mask", masks.previous)):
            parts.append((kind, _bits(masks.layout, mask, sparse)))
        if visits and number < len(visits.rows):
            start, end, mean = visits.starts[2 * number], visits.starts[2 * number + 2], visits.starts[-1] + number
            parts += [("visit rates", visits.rates[start:end]), ("visit rates", visits.rates[mean : mean + 1])]
        # After `finish_previous_step` the moment is stored on the previous mask. With a sharded update the owner stores
        # it; this replica stores its residual, which is zero on that mask.
        held = [(tensor, masks.previous if tensor in sparse else None) for tensor in own]
        on_mask = [(states[i], masks.layout.bits(mask, i) if mask else None) for i, mask in held]
        replicated.append(ReplicatedTensors(shard.name, parts, on_mask))
    return [*replicated, ReplicatedTensors(None, [("count of applied steps", scape.applied_steps)])]


def _bits(layout: BlockLayout, mask: Mask, tensors: list[int]) -> Tensor:
    """Return the packed bits of consecutive tensors; empty for a mask of all ones."""
    if mask.dense or not tensors:
        return mask.bits[:0]
    first, end = layout.first_block[tensors[0]], layout.first_block[tensors[-1]] + layout.blocks[tensors[-1]]
    return mask.bits[first * layout.block_size // 8 : end * layout.block_size // 8]
