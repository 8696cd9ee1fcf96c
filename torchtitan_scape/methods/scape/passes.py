"""Construction of SCAPE's passes and exchange from its options."""

from collections.abc import Sequence

import torch

from torchtitan_scape.core.bf16_weights import share_scale
from torchtitan_scape.core.parameters import Shard, stored
from torchtitan_scape.kernels.backends import block_code, scape_passes
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.scape.blocks import BlockLayout
from torchtitan_scape.kernels.scape.ownership import Ownership
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.step import PayloadPlan
from torchtitan_scape.kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate
from torchtitan_scape.kernels.scape.visits import Staleness
from torchtitan_scape.methods.scape.exchange import Codecs, ReplicatedExchange, ShardedExchange
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.scape.payload import payload_entries
from torchtitan_scape.topology.codecs import Bfloat16, Codec
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.partition import chunk_limit

# About as many chunks of a large payload, unless the cost model chooses their size.
CHUNKS = 8
Exchange = ReplicatedExchange | ShardedExchange


def build_passes(
    sparse: Sequence[Shard],
    dense: Sequence[Shard],
    options: ScapeOptions,
    replicas: ReplicaCollectives,
    device: torch.device,
    backend: str,
) -> tuple[ScapePasses, Exchange]:
    """Return the passes, and the exchange of their payload.

    Args:
        sparse: The sparsified shards; they come first in the order of the passes.
        dense: The shards that are exchanged uncompressed.
        backend: "triton" or "torch".

    Raises:
        ValueError: A parameter is not contiguous and the update is sharded.
    """
    several = replicas.replicas > 1
    codecs = codecs_of(options, backend) if several and options.density < 1.0 else Codecs()
    message_bytes = None if codecs.codec is None else codecs.codec.message_bytes
    sent = payload_entries([s.local_shape for s in (*sparse, *dense)], options.density, options.block_size)
    # Parts of one buffer need no memory of their own: as few chunks as let the first ones be sent early.
    limit = max(chunk_limit(sent, replicas.replicas, message_bytes), -(-sent // CHUNKS))
    plan = PayloadPlan(
        options.selection,
        options.density,
        replica=None if replicas.is_fake else replicas.replica,  # a dry run has no other replicas that select
        chunk_entries=(options.chunk_bytes // 4 or limit) if several else 0,
        chunk_multiple=replicas.size_multiple(codecs.codec),
        size_multiple=max(codec.block_size if codec else 1 for codec in (codecs.codec, codecs.update)),
        keeps_code_error=codecs.codec is not None,
    )
    staleness = None
    if options.staleness_scaling:
        staleness = Staleness(tuple(s.columns for s in sparse), options.max_staleness, options.keep_moment)
    layout = BlockLayout(tuple(s.size for s in sparse), options.block_size, replicas.replicas)

    def passes_of(updater: ReplicatedUpdate | ShardedUpdate) -> ScapePasses:
        return scape_passes(backend, updater, plan, device, offload=options.offload, staleness=staleness)

    if options.update == "sharded":
        owner = sharded_update(sparse, dense, layout, options, replicas, device)
        passes = passes_of(owner)
        return passes, ShardedExchange(passes, owner, replicas, codecs)
    has_master = options.weights_dtype == "bfloat16"
    passes = passes_of(ReplicatedUpdate(layout, [s.size for s in dense], has_master, replicas.is_writer))
    return passes, ReplicatedExchange(passes, replicas, codecs)


def codecs_of(options: ScapeOptions, backend: str) -> Codecs:
    """Return the codecs for the options `code` and `update_code`."""

    def both(code: str) -> tuple[Codec | None, Codec | None]:
        """Return the codecs for (the target density, the density warm-up)."""
        return (block_code(backend, code), block_code(backend, "int8")) if code in FORMATS else (None, None)

    codec, warmup = (Bfloat16(), None) if options.code == "bfloat16" else both(options.code)
    return Codecs(codec, warmup, *both(options.update_code))


def sharded_update(
    sparse: Sequence[Shard],
    dense: Sequence[Shard],
    layout: BlockLayout,
    options: ScapeOptions,
    replicas: ReplicaCollectives,
    device: torch.device,
) -> ShardedUpdate:
    """Return the update in which the owner of an entry updates it.

    Raises:
        ValueError: A parameter is not contiguous.
    """
    shards = [*sparse, *dense]
    for shard in shards:
        if not stored(shard.parameter).is_contiguous():
            raise ValueError(
                f"{shard.name!r} is not contiguous; update = 'sharded' divides tensors into slices: make it contiguous"
            )
    compressed = replicas.replicas > 1 and options.density < 1.0
    owner = ShardedUpdate(
        Ownership.of(layout, [s.size for s in dense]),
        replicas.replica,
        device,
        rounds_values=options.update_code == "bfloat16" and compressed,
        sends_changes=options.update_code in FORMATS and compressed,
        scaled=options.weights_dtype == "bfloat16",
        writes=replicas.is_writer,
    )
    # There is one scale per slice, or none. All slices of a tensor have the same scale, so the last one is used.
    for (number, _, _), scale in zip(owner.slices, owner.scales, strict=False):
        share_scale(shards[number].parameter, scale, owner.writes)
    owner.load_scales(owner.scales)
    return owner
