"""What a SCAPE step is made of, by what was chosen: passes, exchange, and the tensors that they work on."""

from collections.abc import Sequence

import torch

from kernels import block_code, scape_passes
from kernels.codec.formats import FORMATS
from kernels.scape.blocks import BlockLayout
from kernels.scape.ownership import OwnedSlice, Ownership
from kernels.scape.passes import ScapePasses
from kernels.scape.step import PayloadPlan
from kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate
from kernels.scape.visits import Staleness
from topology.codecs import Bfloat16, Codec
from topology.collectives import ReplicaCollectives
from topology.partition import CHUNK_ENTRIES
from torchtitan_scape.core.bf16_weights import share_scale
from torchtitan_scape.core.parameters import Shard, stored
from torchtitan_scape.methods.scape.exchange import ReplicatedExchange, ShardedExchange, WireCodecs
from torchtitan_scape.methods.scape.options import ScapeOptions

# What the passes call tensors: (number of the shard, the part of it or None for all).
Pieces = list[tuple[int, OwnedSlice | None]]
Exchange = ReplicatedExchange | ShardedExchange


def build_passes(
    sparse: Sequence[Shard],
    dense: Sequence[Shard],
    options: ScapeOptions,
    replicas: ReplicaCollectives,
    device: torch.device,
    backend: str,
) -> tuple[ScapePasses, Exchange, Pieces]:
    """Of these shards, sparsified ones first, then those that are exchanged whole. backend: "triton" or "torch"."""
    several = replicas.replicas > 1
    wire = wire_of(options, backend) if several and options.density < 1.0 else WireCodecs()
    plan = PayloadPlan(
        options.selection,
        options.density,
        replica=None if replicas.is_fake else replicas.replica,  # in a dry run nobody else selects
        chunk_entries=(options.chunk_bytes // 4 or CHUNK_ENTRIES) if several else 0,
        chunk_multiple=replicas.size_multiple(wire.codec),
        size_multiple=max(codec.block_size if codec else 1 for codec in (wire.codec, wire.values)),
        keeps_wire_error=wire.codec is not None,
    )
    staleness = None
    if options.staleness_scaling:
        staleness = Staleness(tuple(s.columns for s in sparse), options.max_staleness, options.keep_moment)
    layout = BlockLayout(tuple(s.size for s in sparse), options.block_size, replicas.replicas)

    def passes_of(updater: ReplicatedUpdate | ShardedUpdate) -> ScapePasses:
        return scape_passes(backend, updater, plan, device, offload=options.offload, staleness=staleness)

    if options.update == "sharded":
        owner, pieces = sharded(sparse, dense, layout, options, replicas, device)
        passes = passes_of(owner)
        return passes, ShardedExchange(passes, owner, replicas, wire), pieces
    updater, pieces = replicated(sparse, dense, layout, options, replicas.is_writer)
    passes = passes_of(updater)
    return passes, ReplicatedExchange(passes, replicas, wire), pieces


def wire_of(options: ScapeOptions, backend: str) -> WireCodecs:
    def codecs(wire: str) -> tuple[Codec | None, Codec | None]:
        """Of the target density, and of the density warm-up."""
        return (block_code(backend, wire), block_code(backend, "int8")) if wire in FORMATS else (None, None)

    codec, warmup = (Bfloat16(), None) if options.wire == "bfloat16" else codecs(options.wire)
    return WireCodecs(codec, warmup, *codecs(options.values))


def replicated(
    sparse: Sequence[Shard], dense: Sequence[Shard], layout: BlockLayout, options: ScapeOptions, writes: bool
) -> tuple[ReplicatedUpdate, Pieces]:
    """Every replica updates all. layout: of the sparsified shards; the dense ones follow."""
    has_master = options.weights_dtype == "bfloat16"
    updater = ReplicatedUpdate(layout, [s.size for s in dense], has_master, writes)
    return updater, [(i, None) for i in range(len(sparse) + len(dense))]


def sharded(
    sparse: Sequence[Shard],
    dense: Sequence[Shard],
    layout: BlockLayout,
    options: ScapeOptions,
    replicas: ReplicaCollectives,
    device: torch.device,
) -> tuple[ShardedUpdate, Pieces]:
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
    owner = ShardedUpdate(
        ownership,
        replicas.replica,
        device,
        rounds_values=options.values == "bfloat16" and compressed,
        sends_changes=options.values in FORMATS and compressed,
        scaled=options.weights_dtype == "bfloat16",
        writes=replicas.is_writer,
    )
    for (number, _), scale in zip(pieces, owner.scales, strict=False):  # there are none, or one of every piece
        share_scale(shards[number].parameter, scale, owner.writes)  # of a tensor's pieces the last one's; all are equal
    owner.load_scales(owner.scales)
    return owner, pieces
