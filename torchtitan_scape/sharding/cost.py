"""Cost of the shard axis in closed form: FSDP2's own collectives, ZeRO++, and Muon's matrix exchanges. No torch.

Messages are those of `sharding.messages`, padding included. Bytes are counted per link level, as in
`topology.shard_collectives`, and averaged over the ranks of the group.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchtitan_scape.core.workloads import LocalModel, Shape, Workload
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.common.alignment import padded_bytes
from torchtitan_scape.optimizers.cost import get_optimizer_cost
from torchtitan_scape.sharding.tagc_cost import SparsePlan
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.ring_bytes import Stage, all_gather_stages

_SCALE = 4  # bytes
_CUT_BIASES = ("wq.bias", "wk.bias", "wv.bias", "w1.bias")


@dataclass(frozen=True)
class ShardPlan:
    """Configuration of the all-gather and the reduce-scatter of the shard axis.

    Attributes:
        weights: Name of the block code, or "dense".
        weights_block: Entries that share a scale.
        secondary: Weights are sent between nodes once per update (hpZ).
        gradients: Codes of the hops, innermost first; () for dense.
        gradients_block: Entries that share a scale.
        hops: 1 or 2.
        weight_bytes: Bytes per entry of weights that are not quantized.
        gradient_bytes: Bytes per entry of dense gradients.
        exchanged: Dense gradients use an all-to-all, as on gloo, instead of a ring.
        sparse: Plan of TAGC, if it reduces the gradients.
    """

    weights: str = "dense"
    weights_block: int = 256
    secondary: bool = False
    gradients: tuple[str, ...] = ()
    gradients_block: int = 128
    hops: int = 1
    weight_bytes: int = 2
    gradient_bytes: int = 4
    exchanged: bool = False
    sparse: SparsePlan | None = None

    @property
    def active(self) -> bool:
        return self.weights != "dense" or self.secondary or bool(self.gradients) or self.sparse is not None


@dataclass(frozen=True)
class FlatRow:
    """One rank's row of an FSDP2 parameter group.

    Attributes:
        shapes: Shapes of the rank's shards.
        gathers: All-gathers per micro-batch.
        names: Names of the parameters.
    """

    shapes: tuple[Shape, ...]
    gathers: int = 2
    names: tuple[str, ...] = ()

    @property
    def entries(self) -> int:
        return sum(map(math.prod, self.shapes))

    def message_bytes(self, code: str, block: int, raw: int) -> int:
        """Return the size in bytes of the row's message.

        Args:
            code: Name of the block code; "dense" sends the whole row raw.
            block: Entries that share a scale.
            raw: Bytes per entry that is not quantized.
        """
        coded = 0 if code == "dense" else sum(-(-math.prod(s) // block) * block for s in self.shapes if len(s) > 1)
        rest = sum(math.prod(s) for s in self.shapes if code == "dense" or len(s) == 1)
        size = coded * FORMATS[code].bits // 8 + coded // block * _SCALE if coded else 0
        return padded_bytes(size) + padded_bytes(rest * raw)


def flat_rows(workload: Workload, ranks: int, tensor: int = 1, reshard: str = "default") -> tuple[FlatRow, ...]:
    """Return the rows of TorchTitan's parameter groups: embeddings, each layer, and the last group.

    For GPT-2 the embeddings and the parameters after the layers form one group, that of the root module.

    Args:
        workload: Model and batch.
        ranks: Ranks of the shard axis.
        tensor: Degree of tensor parallelism. It divides matrices, and the biases of layers that are split by outputs.
        reshard: `[parallelism] fsdp_reshard_after_forward`. A group that is not resharded is gathered once per
            micro-batch; by default this is the last group.
    """
    shapes, names = [], workload.names()
    for name, (rows, *rest) in zip(names, workload.shapes(), strict=True):
        local_rows = -(-rows // tensor) if rest or name.endswith(_CUT_BIASES) else rows
        shapes.append((-(-local_rows // ranks), *rest))
    first = 2 if workload.gpt2 else 1
    per_layer = (len(shapes) - first - 2) // workload.layers
    ends = [0, *(first + i * per_layer for i in range(workload.layers + 1)), len(shapes)]
    gathers = 1 if reshard == "never" else 2
    groups = [FlatRow(tuple(shapes[a:b]), gathers, names=names[a:b]) for a, b in itertools.pairwise(ends)]
    if workload.gpt2:
        (tables, *groups, norm) = groups
        groups.append(replace(norm, shapes=tables.shapes + norm.shapes, names=tables.names + norm.names))
    return (*groups[:-1], replace(groups[-1], gathers=2 if reshard == "always" else 1))


def mean_gathers(rows: Sequence[FlatRow]) -> float:
    """Return the mean number of all-gathers of an entry per micro-batch."""
    return sum(row.gathers * row.entries for row in rows) / sum(row.entries for row in rows)


@dataclass(frozen=True)
class _Sent:
    """One collective.

    Attributes:
        kind: Kind of its bytes in the ledger.
        stage: Traffic of one rank, as the mean over ranks.
        times: Number of calls per step.
    """

    kind: str
    stage: Stage
    times: float


def _gather_stages(rank_groups: Sequence[tuple[int, ...]], own_bytes: float, layout: Layout) -> Iterator[Stage]:
    """Yield the stages of an all-gather of `own_bytes` bytes per rank over each rank group."""
    for level, share in _shares([layout.successor_level(rank, ranks) for ranks in rank_groups for rank in ranks]):
        others = len(rank_groups[0]) - 1
        yield Stage(level, share * others, share * others * own_bytes)


def _exchange_stages(rank_groups: Sequence[tuple[int, ...]], input_bytes: float, layout: Layout) -> Iterator[Stage]:
    """Yield the stages of an all-to-all with `input_bytes` bytes of input per rank over each rank group."""
    pairs = [layout.level(a, b) for ranks in rank_groups for a in ranks for b in ranks if a != b]
    others = len(rank_groups[0]) - 1
    for level, share in _shares(pairs):
        yield Stage(level, share * others, share * others / len(rank_groups[0]) * input_bytes)


def _shares(levels: Sequence[str]) -> list[tuple[str, float]]:
    return [(level, levels.count(level) / len(levels)) for level in dict.fromkeys(levels)]


def _collectives(plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> Iterator[_Sent]:
    group = layout.shard_group(0)
    whole, nodes = [group], list(layout.by_node(group))
    between_nodes = [tuple(ranks) for ranks in zip(*nodes, strict=plan.hops == 2)]
    ranks = len(group)
    # Innermost first; a group of one rank sends nothing.
    rank_groups = [one for one in ((nodes, between_nodes) if plan.hops == 2 else (whole,)) if len(one[0]) > 1]
    for row in rows:
        gathers = micro_batches * row.gathers
        if plan.weights == "dense" and not plan.secondary:
            yield from (
                _Sent("weights", s, gathers) for s in _gather_stages(whole, row.entries * plan.weight_bytes, layout)
            )
        else:
            sent = row.message_bytes(plan.weights, plan.weights_block, plan.weight_bytes)
            for number, groups in enumerate(reversed(rank_groups)):
                times = 1 if plan.secondary and number == 0 else gathers
                yield from (_Sent("weights", stage, times) for stage in _gather_stages(groups, sent, layout))
                sent *= len(groups[0])
        if plan.sparse is not None:
            yield from _sparse(plan.sparse, row, layout, micro_batches)
            continue
        if not plan.gradients:
            stages = _exchange_stages if plan.exchanged else _scatter_stages
            sent = row.entries * ranks * plan.gradient_bytes
            yield from (_Sent("gradients", stage, micro_batches) for stage in stages(whole, sent, layout))
            continue
        remaining = ranks
        for number, groups in enumerate(rank_groups):
            code = plan.gradients[min(number, len(plan.gradients) - 1)]
            sent = remaining * row.message_bytes(code, plan.gradients_block, 4)
            yield from (_Sent("gradients", stage, micro_batches) for stage in _exchange_stages(groups, sent, layout))
            remaining //= len(groups[0])


def _sparse(plan: SparsePlan, row: FlatRow, layout: Layout, micro_batches: int) -> Iterator[_Sent]:
    whole = [layout.shard_group(0)]
    ranks, times = len(whole[0]), micro_batches if plan.each else 1
    if blocks := plan.blocks(row.shapes, row.names, ranks):
        yield from (_Sent("index", s, times) for s in _exchange_stages(whole, plan.exchanged(blocks, ranks), layout))
        yield from (_Sent("index", s, times) for s in _gather_stages(whole, plan.gathered(blocks, ranks), layout))
    values = plan.values(row.shapes, row.names, ranks)
    yield from (_Sent("gradients", stage, times) for stage in _exchange_stages(whole, values, layout))


def _scatter_stages(rank_groups: Sequence[tuple[int, ...]], input_bytes: float, layout: Layout) -> Iterator[Stage]:
    """Yield the stages of a ring reduce-scatter with `input_bytes` bytes of input per rank over each rank group."""
    return _gather_stages(rank_groups, input_bytes / len(rank_groups[0]), layout)


def shard_bytes(
    plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout, micro_batches: int
) -> dict[tuple[str, str], float]:
    """Return the bytes per step that a rank of the first shard group sends, as the mean over ranks, by (link level,
    kind).
    """
    sent: dict[tuple[str, str], float] = defaultdict(float)
    if layout.shard * layout.context > 1:
        for call in _collectives(plan, rows, layout, micro_batches):
            sent[call.stage.level, call.kind] += call.times * call.stage.sent
    return dict(sent)


def shard_stages(plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> list[Stage]:
    """Return the same traffic as a list of stages that run one after the other."""
    if layout.shard * layout.context == 1:
        return []
    calls = _collectives(plan, rows, layout, micro_batches)
    return [Stage(call.stage.level, call.times * call.stage.rounds, call.times * call.stage.sent) for call in calls]


def matrix_stages(optimizer: str, model: LocalModel, layout: Layout, times: float = 1.0) -> list[Stage]:
    """Return the stages of the optimizer's matrix exchange between the ranks of a replica, averaged over ranks.

    Each rank receives one whole matrix at a time and returns its parts. Other optimizers exchange nothing.

    Args:
        model: Whole parameters.
        times: Exchanges of every matrix per step.
    """
    group, parts_of = layout.shard_group(0), get_optimizer_cost(optimizer).parts
    if parts_of is None or len(group) == 1:
        return []
    parts = parts_of(model, len(group))
    sent: dict[str, float] = defaultdict(float)
    for owner, nbytes in parts:
        for rank in (rank for rank in group if rank != group[owner]):
            sent[layout.level(rank, group[owner])] += 2 * nbytes / len(group)
    exchanges = 2 * -(-len(parts) // len(group))
    stages = _exchange_stages([group], 0.0, layout)
    return [Stage(one.level, times * exchanges * one.rounds, times * sent[one.level]) for one in stages]


def gathered_matrices(optimizer: str, model: LocalModel, layout: Layout) -> list[int]:
    """Return the bytes per rank of each all-gather of matrices that replicas divide; [] if there are none.

    Args:
        model: Whole parameters.
    """
    ranks, replicas = len(layout.shard_group(0)), layout.replicate
    parts_of = get_optimizer_cost(optimizer).parts
    if parts_of is None or replicas == 1:
        return []
    sizes = [int(nbytes) for _, nbytes in parts_of(model, ranks)]
    per_replica = [sum(sizes[first : first + ranks]) for first in range(0, len(sizes), ranks)]
    rounds = [per_replica[first : first + replicas] for first in range(0, len(per_replica), replicas)]
    return [padded_bytes(max(part)) for part in rounds]


def gather_stages(optimizer: str, model: LocalModel, layout: Layout) -> list[Stage]:
    """Return the stages of these all-gathers."""
    levels, gathers = layout.hierarchy(layout.replicate_group(0)), gathered_matrices(optimizer, model, layout)
    return [stage for nbytes in gathers for stage in all_gather_stages(nbytes, levels)]


def shard_memory(plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout) -> dict[str, float]:
    """Return the bytes that the hooks keep ("secondary weights", "shard residual") and the temporary buffers of the
    largest group ("shard messages").
    """
    group = layout.shard_group(0)
    ranks, nodes = len(group), layout.by_node(group)
    if ranks == 1 or not plan.active:
        return {}
    kinds: dict[str, float] = {}
    messages = [0.0]
    for row in rows:
        message = row.message_bytes(plan.weights, plan.weights_block, plan.weight_bytes)
        if plan.secondary:
            kinds["secondary weights"] = kinds.get("secondary weights", 0.0) + len(nodes) * message
        if plan.weights != "dense" or plan.secondary:
            forwarded = len(nodes) if plan.hops == 2 and not plan.secondary else 0
            # The messages of all ranks are decoded at once, to FP32.
            messages.append((1 + ranks + forwarded) * message + 4.0 * ranks * row.entries)
        if plan.sparse is not None:
            kinds["shard residual"] = kinds.get("shard residual", 0.0) + plan.sparse.kept(row.shapes, row.names, ranks)
            messages.append(2 * plan.sparse.values(row.shapes, row.names, ranks))
        if plan.gradients:
            input_bytes = ranks * row.message_bytes(plan.gradients[0], plan.gradients_block, 4)
            sums = 4.0 * row.entries * (len(nodes) if plan.hops == 2 else 1)
            messages.append(2 * input_bytes + sums + 4.0 * ranks * row.entries)
    return kinds | {"shard messages": max(messages)}
