"""What a SCAPE step is made of, by what was chosen: passes, exchange, and the tensors that they work on."""

from collections.abc import Sequence

import torch

from kernels import block_code, scape_passes
from kernels.codec.formats import FORMATS
from kernels.scape.blocks import BlockLayout
from kernels.scape.ownership import Ownership, Piece
from kernels.scape.passes import ScapePasses
from kernels.scape.step import Plan
from kernels.scape.updaters import Owner, Replicated
from kernels.scape.visits import Staleness
from topology.codecs import Bfloat16, Codec
from topology.collectives import ReplicaCollectives
from topology.partition import CHUNK_ENTRIES
from torchtitan_scape.sync.scape.exchange import ReplicatedExchange, ShardedExchange, Wire
from torchtitan_scape.sync.scape.options import ScapeOptions
from torchtitan_scape.sync.scape.weights import share_scale
from torchtitan_scape.sync.shards import Shard, stored

# What the passes call tensors: (number of the shard, the part of it or None for all).
Pieces = list[tuple[int, Piece | None]]
Exchange = ReplicatedExchange | ShardedExchange


def compose(
    sparse: Sequence[Shard],
    dense: Sequence[Shard],
    options: ScapeOptions,
    replicas: ReplicaCollectives,
    device: torch.device,
    backend: str,
) -> tuple[ScapePasses, Exchange, Pieces]:
    """Of these shards, sparsified ones first, then those that are exchanged whole. backend: "triton" or "torch"."""
    several = replicas.replicas > 1
    wire = wire_of(options, backend) if several and options.density < 1.0 else Wire()
    plan = Plan(
        options.selection,
        options.density,
        replica=None if replicas.is_fake else replicas.replica,  # in a dry run nobody else selects
        chunk_entries=(options.chunk_bytes // 4 or CHUNK_ENTRIES) if several else 0,
        granularity=replicas.granularity(wire.codec),
        unit=max(codec.unit if codec else 1 for codec in (wire.codec, wire.values)),
        carries=wire.codec is not None,
    )
    staleness = None
    if options.staleness_scaling:
        staleness = Staleness(tuple(s.columns for s in sparse), options.max_staleness, options.keep_moment)
    layout = BlockLayout(tuple(s.size for s in sparse), options.block_size, replicas.replicas)

    def passes_of(updater: Replicated | Owner) -> ScapePasses:
        return scape_passes(backend, updater, plan, device, offload=options.offload, staleness=staleness)

    if options.update == "sharded":
        owner, pieces = sharded(sparse, dense, layout, options, replicas, device)
        passes = passes_of(owner)
        return passes, ShardedExchange(passes, owner, replicas, wire), pieces
    updater, pieces = replicated(sparse, dense, layout, options, replicas.writes)
    passes = passes_of(updater)
    return passes, ReplicatedExchange(passes, replicas, wire), pieces


def wire_of(options: ScapeOptions, backend: str) -> Wire:
    def codecs(wire: str) -> tuple[Codec | None, Codec | None]:
        """Of the target density, and of the density warm-up."""
        return (block_code(backend, wire), block_code(backend, "int8")) if wire in FORMATS else (None, None)

    codec, warmup = (Bfloat16(), None) if options.wire == "bfloat16" else codecs(options.wire)
    return Wire(codec, warmup, *codecs(options.values))


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
    compressed = replicas.replicas > 1 and options.density < 1.0
    owner = Owner(
        ownership,
        replicas.replica,
        device,
        rounds_values=options.values == "bfloat16" and compressed,
        sends_changes=options.values in FORMATS and compressed,
        scaled=options.weights_dtype == "bfloat16",
        writes=replicas.writes,
    )
    for (number, _), scale in zip(pieces, owner.scales, strict=False):  # there are none, or one of every piece
        share_scale(shards[number].parameter, scale, owner.writes)  # of a tensor's pieces the last one's; all are equal
    owner.load_scales(owner.scales)
    return owner, pieces
