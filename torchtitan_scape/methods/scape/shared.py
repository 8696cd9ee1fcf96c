"""SCAPE's replicated tensors, for the consistency check."""

from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import stored
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask
from torchtitan_scape.kernels.scape.updaters import ShardedUpdate
from torchtitan_scape.methods.scape.components import ScapeComponents
from torchtitan_scape.methods.scape.state import StateByParameter


def replicated_by_scape(scape: ScapeComponents) -> list[ReplicatedTensors]:
    """Return SCAPE's replicated tensors: parameters, scales, masks, visit rates and a replicated master copy.

    Call `finish_previous_step` first.
    """
    passes, masks, visits = scape.passes, scape.masks, scape.passes.visits
    cut = [[tensor for tensor, _, _ in slices] for slices in StateByParameter(scape).slices]
    states = passes.kept("state")
    owner = passes.updater if isinstance(passes.updater, ShardedUpdate) else None
    masters = passes.kept("master") if owner is None else []
    found = []
    for number, (shard, own) in enumerate(zip(scape.ordered, cut, strict=True)):
        parts: list[tuple[str | None, Tensor]] = [(None, stored(shard.parameter))]
        if owner is not None and scape.bf16_weights:
            parts.append(("scale", owner.scales[own[0] : own[-1] + 1] if own else owner.scales[:0]))
        if masters:
            parts.append(("master", masters[number]))
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
        found.append(ReplicatedTensors(shard.name, parts, on_mask))
    return [*found, ReplicatedTensors(None, [("count of applied steps", scape.applied_steps)])]


def _bits(layout: BlockLayout, mask: Mask, tensors: list[int]) -> Tensor:
    """Return the packed bits of consecutive tensors; empty for a mask of all ones."""
    if mask.dense or not tensors:
        return mask.bits[:0]
    first, end = layout.first_block[tensors[0]], layout.first_block[tensors[-1]] + layout.blocks[tensors[-1]]
    return mask.bits[first * layout.block_size // 8 : end * layout.block_size // 8]
