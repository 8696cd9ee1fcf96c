"""Cost of the shard axis in closed form: FSDP2's own collectives, ZeRO++, and Muon's matrix exchange. No torch.

Messages are those of `sharding.messages`, padding included. Bytes are counted per link level, as in
`topology.shard_collectives`, and averaged over the ranks of the group.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernels.codec.formats import FORMATS
from topology.layout import Layout
from topology.links import Stage
from torchtitan_scape.core.workloads import Shape, Shapes, Workload
from torchtitan_scape.optimizers.cost import get_optimizer_cost
from torchtitan_scape.sharding.tagc_cost import SparsePlan

_ALIGNED = 16
_SCALE = 4  # bytes
_CUT_BIASES = ("wq.bias", "wk.bias", "wv.bias", "w1.bias")


@dataclass(frozen=True)
class ShardPlan:
    """How weights are gathered and gradients are reduced.

    weights: a code, or "dense". gradients: of the hops, from the inside out; () for dense. hops: 1 or 2.
    weight_bytes, gradient_bytes: of an entry that is not coded.
    exchanged: dense gradients go part by part, as on gloo, not round a ring. sparse: they are reduced by TAGC.
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
    """What a rank keeps of one of FSDP's groups: the shapes of its shards. gathers: in a micro-batch. names: of its
    parameters."""

    shapes: tuple[Shape, ...]
    gathers: int = 2
    names: tuple[str, ...] = ()

    @property
    def entries(self) -> int:
        return sum(map(math.prod, self.shapes))

    def message_bytes(self, code: str, block: int, raw: int) -> int:
        """Of the row; "dense" for all of it as it is. raw: bytes of an entry that is not coded."""
        coded = 0 if code == "dense" else sum(-(-math.prod(s) // block) * block for s in self.shapes if len(s) > 1)
        rest = sum(math.prod(s) for s in self.shapes if code == "dense" or len(s) == 1)
        size = coded * FORMATS[code].bits // 8 + coded // block * _SCALE if coded else 0
        return _padded(size) + _padded(rest * raw)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def flat_rows(workload: Workload, ranks: int, tensor: int = 1, reshard: str = "default") -> tuple[FlatRow, ...]:
    """TorchTitan's groups over so many ranks: embeddings, every layer, then what follows. GPT-2's embeddings and what
    follows its layers are one, of the root.

    tensor: of tensor parallelism, which divides matrices besides, and biases of those that it cuts by outputs.
    reshard: `[parallelism] fsdp_reshard_after_forward`; a group that is not resharded is gathered once; by default that
        is the last one.
    """
    shapes, names = [], workload.names()
    for name, (rows, *rest) in zip(names, workload.shapes(), strict=True):
        own = -(-rows // tensor) if rest or name.endswith(_CUT_BIASES) else rows
        shapes.append((-(-own // ranks), *rest))
    first = 2 if workload.gpt2 else 1
    each = (len(shapes) - first - 2) // workload.layers
    ends = [0, *(first + i * each for i in range(workload.layers + 1)), len(shapes)]
    gathers = 1 if reshard == "never" else 2
    found = [FlatRow(tuple(shapes[a:b]), gathers, names=names[a:b]) for a, b in itertools.pairwise(ends)]
    if workload.gpt2:
        (tables, *found, norm) = found
        found.append(replace(norm, shapes=tables.shapes + norm.shapes, names=tables.names + norm.names))
    return (*found[:-1], replace(found[-1], gathers=2 if reshard == "always" else 1))


def mean_gathers(rows: Sequence[FlatRow]) -> float:
    """Of an entry, in a micro-batch."""
    return sum(row.gathers * row.entries for row in rows) / sum(row.entries for row in rows)


@dataclass(frozen=True)
class _Sent:
    """A collective: its stage of one rank in the mean, and how often a step has it."""

    kind: str
    stage: Stage
    times: float


def _round(circles: Sequence[tuple[int, ...]], own: float, layout: Layout) -> Iterator[Stage]:
    """A gather of `own` bytes a rank, round every circle."""
    for level, share in _shares([layout.ring_level(rank, ranks) for ranks in circles for rank in ranks]):
        others = len(circles[0]) - 1
        yield Stage(level, share * others, share * others * own)


def _parts(circles: Sequence[tuple[int, ...]], given: float, layout: Layout) -> Iterator[Stage]:
    """An exchange of parts of `given` bytes in every circle."""
    pairs = [layout.level(a, b) for ranks in circles for a in ranks for b in ranks if a != b]
    others = len(circles[0]) - 1
    for level, share in _shares(pairs):
        yield Stage(level, share * others, share * others / len(circles[0]) * given)


def _shares(levels: Sequence[str]) -> list[tuple[str, float]]:
    return [(level, levels.count(level) / len(levels)) for level in dict.fromkeys(levels)]


def _collectives(plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> Iterator[_Sent]:
    group = layout.shard_group(0)
    whole, nodes = [group], list(layout.by_node(group))
    across = [tuple(ranks) for ranks in zip(*nodes, strict=plan.hops == 2)]
    ranks = len(group)
    # From the inside out; a circle of one sends nothing.
    circles = [one for one in ((nodes, across) if plan.hops == 2 else (whole,)) if len(one[0]) > 1]
    for row in rows:
        gathers = micro_batches * row.gathers
        if plan.weights == "dense" and not plan.secondary:
            yield from (_Sent("weights", s, gathers) for s in _round(whole, row.entries * plan.weight_bytes, layout))
        else:
            own = row.message_bytes(plan.weights, plan.weights_block, plan.weight_bytes)
            for number, circle in enumerate(reversed(circles)):
                times = 1 if plan.secondary and number == 0 else gathers
                yield from (_Sent("weights", stage, times) for stage in _round(circle, own, layout))
                own *= len(circle[0])
        if plan.sparse is not None:
            yield from _sparse(plan.sparse, row, layout, micro_batches)
            continue
        if not plan.gradients:
            stages = _parts if plan.exchanged else _ring
            given = row.entries * ranks * plan.gradient_bytes
            yield from (_Sent("gradients", stage, micro_batches) for stage in stages(whole, given, layout))
            continue
        left = ranks
        for number, circle in enumerate(circles):
            code = plan.gradients[min(number, len(plan.gradients) - 1)]
            given = left * row.message_bytes(code, plan.gradients_block, 4)
            yield from (_Sent("gradients", stage, micro_batches) for stage in _parts(circle, given, layout))
            left //= len(circle[0])


def _sparse(plan: SparsePlan, row: FlatRow, layout: Layout, micro_batches: int) -> Iterator[_Sent]:
    whole = [layout.shard_group(0)]
    ranks, times = len(whole[0]), micro_batches if plan.each else 1
    if blocks := plan.blocks(row.shapes, row.names, ranks):
        yield from (_Sent("index", s, times) for s in _parts(whole, plan.exchanged(blocks, ranks), layout))
        yield from (_Sent("index", s, times) for s in _round(whole, plan.gathered(blocks, ranks), layout))
    values = plan.values(row.shapes, row.names, ranks)
    yield from (_Sent("gradients", stage, times) for stage in _parts(whole, values, layout))


def _ring(circles: Sequence[tuple[int, ...]], given: float, layout: Layout) -> Iterator[Stage]:
    """A reduce-scatter of `given` bytes round every circle."""
    return _round(circles, given / len(circles[0]), layout)


def shard_bytes(
    plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout, micro_batches: int
) -> dict[tuple[str, str], float]:
    """Bytes that a rank of the first group sends in a step, in the mean, by (level, kind)."""
    sent: dict[tuple[str, str], float] = defaultdict(float)
    if layout.shard * layout.context > 1:
        for one in _collectives(plan, rows, layout, micro_batches):
            sent[one.stage.level, one.kind] += one.times * one.stage.sent
    return dict(sent)


def shard_stages(plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> list[Stage]:
    """The same as stages that follow one another."""
    if layout.shard * layout.context == 1:
        return []
    found = _collectives(plan, rows, layout, micro_batches)
    return [Stage(one.stage.level, one.times * one.stage.rounds, one.times * one.stage.sent) for one in found]


def matrix_stages(optimizer: str, shapes: Shapes, layout: Layout) -> list[Stage]:
    """Return the stages of the optimizer's matrix exchange between the ranks of a replica, averaged over ranks.

    Each rank receives one whole matrix at a time and returns its parts. Other optimizers exchange nothing.

    Args:
        shapes: Shapes of whole parameters.
    """
    group, parts_of = layout.shard_group(0), get_optimizer_cost(optimizer).parts
    if parts_of is None or len(group) == 1:
        return []
    parts = parts_of(shapes, len(group))
    sent: dict[str, float] = defaultdict(float)
    for owner, nbytes in parts:
        for rank in (rank for rank in group if rank != group[owner]):
            sent[layout.level(rank, group[owner])] += 2 * nbytes / len(group)
    exchanges = 2 * -(-len(parts) // len(group))
    return [Stage(one.level, exchanges * one.rounds, sent[one.level]) for one in _parts([group], 0.0, layout)]


def shard_memory(plan: ShardPlan, rows: Sequence[FlatRow], layout: Layout) -> dict[str, float]:
    """Bytes that stand-ins keep ("secondary weights", "shard residual"), and need at once for the largest group
    ("shard messages")."""
    group = layout.shard_group(0)
    ranks, nodes = len(group), layout.by_node(group)
    if ranks == 1 or not plan.active:
        return {}
    kinds: dict[str, float] = {}
    messages = [0.0]
    for row in rows:
        own = row.message_bytes(plan.weights, plan.weights_block, plan.weight_bytes)
        if plan.secondary:
            kinds["secondary weights"] = kinds.get("secondary weights", 0.0) + len(nodes) * own
        if plan.weights != "dense" or plan.secondary:
            passing = len(nodes) if plan.hops == 2 and not plan.secondary else 0
            messages.append((1 + ranks + passing) * own + 4.0 * row.entries)
        if plan.sparse is not None:
            kinds["shard residual"] = kinds.get("shard residual", 0.0) + plan.sparse.kept(row.shapes, row.names, ranks)
            messages.append(2 * plan.sparse.values(row.shapes, row.names, ranks))
        if plan.gradients:
            given = ranks * row.message_bytes(plan.gradients[0], plan.gradients_block, 4)
            sums = 4.0 * row.entries * (len(nodes) if plan.hops == 2 else 1)
            messages.append(2 * given + sums + 4.0 * row.entries)
    return kinds | {"shard messages": max(messages)}
