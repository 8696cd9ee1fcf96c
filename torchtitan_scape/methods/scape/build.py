"""SCAPE for the trainer: what it needs to know of the machine beside its options."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from topology.collectives import ReplicaCollectives
from topology.layout import Layout
from topology.links import Links
from topology.machines import MEMORY_EFFICIENCY
from topology.pipelining import best_chunk_bytes
from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.parameters import local
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.scape.method import Scape
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.scape.payload import payload_entries
from torchtitan_scape.methods.wire import encoded_size


def make_scape(
    model: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    options: ScapeOptions,
    layout: Layout,
    **others: Any,
) -> Callable[[ReplicaCollectives], Scape]:
    """What makes the optimizer of one replica, of the endpoint that it talks through.

    layout: of the run, simulated replicas included. others: the other arguments of `Scape`.
    """
    shapes = [tuple(local(p).shape) for _, p in named]
    if options.weights_dtype == "bfloat16":
        hold_in_bfloat16(model, scaled=options.update == "sharded")

    def make(collectives: ReplicaCollectives) -> Scape:
        chunk_bytes = options.chunk_bytes or best_chunk(shapes, options, layout, collectives)
        # By name: BF16 weights have taken the place of the parameters.
        found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return Scape(found, options=replace(options, chunk_bytes=chunk_bytes), replicas=collectives, **others)

    return make


def best_chunk(
    shapes: Sequence[tuple[int, ...]], options: ScapeOptions, layout: Layout, collectives: ReplicaCollectives
) -> int:
    """The payload's chunk, bytes, that the cost model finds best, from the nominal figures of the machine's preset."""
    # Of the whole group, so that all its ranks agree: the links of one rank's own rings may differ from the next one's.
    tiers = layout.hierarchy(layout.replicate_group(dist.get_rank()))
    plain = ScapeOptions(density=options.density, wire=options.wire, block_size=options.block_size)
    device = layout.machine.device
    packed, _ = plain.cost().memory_traffic(LocalModel.of_shapes(shapes), layout.replicate)
    return best_chunk_bytes(
        4 * payload_entries(shapes, options.density, options.block_size),
        packed / (device.memory_bandwidth * 1e9 * MEMORY_EFFICIENCY),
        [(tier.level, tier.size) for tier in tiers],
        Links.from_machine(layout.machine),
        encoded_size(options.wire),
        flat=len(collectives.rings) < len(tiers),
    )
