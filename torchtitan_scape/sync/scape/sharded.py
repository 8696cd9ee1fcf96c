"""What the tensors of a SCAPE step are, by who updates: whole shards, or pieces that belong to one replica each."""

from collections.abc import Sequence

import torch

from kernels.scape.blocks import BlockLayout
from kernels.scape.ownership import Ownership, Piece
from kernels.scape.updaters import Owner, Replicated
from topology.collectives import ReplicaCollectives
from torchtitan_scape.sync.scape.options import ScapeOptions
from torchtitan_scape.sync.scape.weights import share_scale
from torchtitan_scape.sync.shards import Shard, stored

# What the passes call tensors: (number of the shard, the part of it or None for all).
Pieces = list[tuple[int, Piece | None]]


def replicated(
    sparse: Sequence[Shard], dense: Sequence[Shard], layout: BlockLayout, options: ScapeOptions, writes: bool
) -> tuple[Replicated, Pieces]:
    """Every replica updates all. layout: of the sparsified shards; the dense ones follow."""
    has_master = options.weights_dtype == "bfloat16"
    updater = Replicated(layout, [s.size for s in dense], has_master, writes)
    return updater, [(i, None) for i in range(len(sparse) + len(dense))]


def sharded(
    sparse: Sequence[Shard],
    dense: Sequence[Shard],
    layout: BlockLayout,
    options: ScapeOptions,
    replicas: ReplicaCollectives,
    device: torch.device,
) -> tuple[Owner, Pieces]:
    """Each entry's owner updates it. Raises ValueError for a parameter that cannot be cut."""
    ownership = Ownership.of(layout, [s.size for s in dense])
    shards = [*sparse, *dense]
    pieces: Pieces = [(p.tensor, p) for p in ownership.sparse]
    pieces += [(len(sparse) + p.tensor, p) for p in ownership.whole]
    for number, _ in pieces:
        if not stored(shards[number].parameter).is_contiguous():
            raise ValueError(
                f"{shards[number].name!r} is not contiguous; update = 'sharded' cuts tensors into parts: make it "
                "contiguous"
            )
    owner = Owner(
        ownership,
        replicas.replica,
        device,
        rounds_values=options.values_dtype == "bfloat16" and replicas.replicas > 1 and options.density < 1.0,
        scaled=options.weights_dtype == "bfloat16",
        writes=replicas.writes,
    )
    for (number, _), scale in zip(pieces, owner.scales, strict=False):  # there are none, or one of every piece
        share_scale(shards[number].parameter, scale, owner.writes)  # of a tensor's pieces the last one's; all are equal
    owner.load_scales(owner.scales)
    return owner, pieces
