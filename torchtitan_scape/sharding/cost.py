"""Cost of the shard axis in closed form: FSDP2's own collectives and ZeRO++. No torch.

Messages are those of `sharding.messages`, padding included. Bytes are counted per link level, as in
`topology.shard_collectives`, and averaged over the ranks of the group.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torchtitan_scape.core.workloads import Shape, Workload
from torchtitan_scape.kernels.codec.formats import FORMATS, padded_bytes
from torchtitan_scape.kernels.tagc.formats import BLOCK
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.links import Links, stage_seconds
from torchtitan_scape.topology.ring_bytes import Stage, all_reduce_stages, spanned

WEIGHTS_BLOCK, GRADIENTS_BLOCK = 256, 128  # entries that share a scale
_SCALE = 4  # bytes
_CUT_BIASES = ("wq.bias", "wk.bias", "wv.bias", "w1.bias")


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


@dataclass(frozen=True)
class ShardPlan:
    """Configuration of the all-gather and the reduce-scatter of the shard axis.

    Attributes:
        weights: Name of the block code, or "dense".
        secondary: Weights are sent between nodes once per update (hpZ).
        gradients: Codes of the hops, innermost first; () for dense.
        hops: 1 or 2.
        weight_bytes: Bytes per entry of weights that are not quantized.
        exchanged: Dense gradients use an all-to-all, as on gloo, instead of a ring.
        sparse: Options of TAGC, if it reduces the gradients.
    """

    weights: str = "dense"
    secondary: bool = False
    gradients: tuple[str, ...] = ()
    hops: int = 1
    weight_bytes: int = 2
    exchanged: bool = False
    sparse: TagcShardingOptions | None = None
    sums: ClassVar[bool] = False  # no gradients between nodes

    @property
    def active(self) -> bool:
        return self.weights != "dense" or self.secondary or bool(self.gradients) or self.sparse is not None

    def shards(self, layout: Layout) -> int:
        """Return the ranks over which masters and optimizer states are sharded."""
        return layout.shard * layout.context * layout.tensor

    def sent(self, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> dict[tuple[str, str], float]:
        """Return the bytes per step that a rank of the first shard group sends, as the mean over ranks, by (link level,
        kind).
        """
        sent: dict[tuple[str, str], float] = defaultdict(float)
        for call in self._collectives(rows, layout, micro_batches):
            sent[call.stage.level, call.kind] += call.times * call.stage.sent
        return dict(sent)

    def seconds(self, rows: Sequence[FlatRow], layout: Layout, links: Links, micro_batches: int) -> tuple[float, float]:
        """Return the seconds per step of the traffic that (overlaps with compute, does not).

        FSDP2's own collectives are two all-gathers of BF16 parameters and one reduce-scatter of FP32 gradients for each
        row, as rings over the whole axis.
        """
        if not self.active:
            ring = spanned(layout.hierarchy(layout.model_group(0)), flat=True)
            entries = len(layout.shard_group(0)) * sum(row.entries for row in rows)
            # An all-reduce of n FP32 values sends 8 n bytes in two rounds of the ring, as these three do.
            latency, transfer = stage_seconds(all_reduce_stages(entries, ring), links)
            return micro_batches * (1.5 * len(rows) * latency + transfer), 0.0
        calls = self._collectives(rows, layout, micro_batches)
        stages = [Stage(c.stage.level, c.times * c.stage.rounds, c.times * c.stage.sent) for c in calls]
        return sum(stage_seconds(stages, links)), 0.0

    def memory(self, kinds: dict[str, float], rows: Sequence[FlatRow], layout: Layout) -> dict[str, float]:
        """Return the bytes per rank by kind: `kinds` of optimizer and method, and those of the hooks.

        The hooks keep "secondary weights" and a "shard residual"; "shard messages" are the temporary buffers of the
        largest group.
        """
        group = layout.shard_group(0)
        ranks, nodes = len(group), layout.by_node(group)
        if ranks == 1 or not self.active:
            return kinds
        kinds = dict(kinds)
        messages = [0.0]
        for row in rows:
            message = row.message_bytes(self.weights, WEIGHTS_BLOCK, self.weight_bytes)
            if self.secondary:
                kinds["secondary weights"] = kinds.get("secondary weights", 0.0) + len(nodes) * message
            if self.weights != "dense" or self.secondary:
                forwarded = len(nodes) if self.hops == 2 and not self.secondary else 0
                # The messages of all ranks are decoded at once, to FP32.
                messages.append((1 + ranks + forwarded) * message + 4.0 * ranks * row.entries)
            if self.sparse is not None:
                residual = 4.0 * ranks * BLOCK * self.sparse.blocks(row.shapes, row.names, ranks)  # of all ranks' rows
                kinds["shard residual"] = kinds.get("shard residual", 0.0) + residual
                messages.append(2 * self.sparse.values(row.shapes, row.names, ranks))
            if self.gradients:
                input_bytes = ranks * row.message_bytes(self.gradients[0], GRADIENTS_BLOCK, 4)
                sums = 4.0 * row.entries * (len(nodes) if self.hops == 2 else 1)
                messages.append(2 * input_bytes + sums + 4.0 * ranks * row.entries)
        return kinds | {"shard messages": max(messages)}

    def _collectives(self, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> Iterator[_Sent]:
        group = layout.shard_group(0)
        if len(group) == 1:
            return
        whole, nodes = [group], list(layout.by_node(group))
        between_nodes = [tuple(ranks) for ranks in zip(*nodes, strict=self.hops == 2)]
        ranks = len(group)
        # Innermost first; a group of one rank sends nothing.
        rank_groups = [one for one in ((nodes, between_nodes) if self.hops == 2 else (whole,)) if len(one[0]) > 1]
        for row in rows:
            gathers = micro_batches * row.gathers
            if self.weights == "dense" and not self.secondary:
                yield from (
                    _Sent("weights", s, gathers) for s in _gather_stages(whole, row.entries * self.weight_bytes, layout)
                )
            else:
                sent = row.message_bytes(self.weights, WEIGHTS_BLOCK, self.weight_bytes)
                for number, groups in enumerate(reversed(rank_groups)):
                    times = 1 if self.secondary and number == 0 else gathers
                    yield from (_Sent("weights", stage, times) for stage in _gather_stages(groups, sent, layout))
                    sent *= len(groups[0])
            if self.sparse is not None:
                yield from _sparse(self.sparse, row, layout)
                continue
            if not self.gradients:
                stages = exchange_stages if self.exchanged else _scatter_stages
                sent = 4 * row.entries * ranks
                yield from (_Sent("gradients", stage, micro_batches) for stage in stages(whole, sent, layout))
                continue
            remaining = ranks
            for number, groups in enumerate(rank_groups):
                code = self.gradients[min(number, len(self.gradients) - 1)]
                sent = remaining * row.message_bytes(code, GRADIENTS_BLOCK, 4)
                yield from (_Sent("gradients", stage, micro_batches) for stage in exchange_stages(groups, sent, layout))
                remaining //= len(groups[0])


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


def _gather_stages(rank_groups: Sequence[tuple[int, ...]], own_bytes: float, layout: Layout) -> Iterator[Stage]:
    """Yield the stages of an all-gather of `own_bytes` bytes per rank over each rank group."""
    for level, share in _shares([layout.successor_level(rank, ranks) for ranks in rank_groups for rank in ranks]):
        others = len(rank_groups[0]) - 1
        yield Stage(level, share * others, share * others * own_bytes)


def exchange_stages(rank_groups: Sequence[tuple[int, ...]], input_bytes: float, layout: Layout) -> Iterator[Stage]:
    """Yield the stages of an all-to-all with `input_bytes` bytes of input per rank over each rank group."""
    pairs = [layout.level(a, b) for ranks in rank_groups for a in ranks for b in ranks if a != b]
    others = len(rank_groups[0]) - 1
    for level, share in _shares(pairs):
        yield Stage(level, share * others, share * others / len(rank_groups[0]) * input_bytes)


def _shares(levels: Sequence[str]) -> list[tuple[str, float]]:
    return [(level, levels.count(level) / len(levels)) for level in dict.fromkeys(levels)]


def _sparse(plan: TagcShardingOptions, row: FlatRow, layout: Layout) -> Iterator[_Sent]:
    whole = [layout.shard_group(0)]
    ranks = len(whole[0])
    if blocks := plan.blocks(row.shapes, row.names, ranks):
        yield from (_Sent("index", stage, 1) for stage in exchange_stages(whole, plan.exchanged(blocks, ranks), layout))
        yield from (_Sent("index", stage, 1) for stage in _gather_stages(whole, plan.gathered(blocks, ranks), layout))
    values = plan.values(row.shapes, row.names, ranks)
    yield from (_Sent("gradients", stage, 1) for stage in exchange_stages(whole, values, layout))


def _scatter_stages(rank_groups: Sequence[tuple[int, ...]], input_bytes: float, layout: Layout) -> Iterator[Stage]:
    """Yield the stages of a ring reduce-scatter with `input_bytes` bytes of input per rank over each rank group."""
    return _gather_stages(rank_groups, input_bytes / len(rank_groups[0]), layout)
