"""Cost of the shard axis in closed form: FSDP2's own collectives, ZeRO++ and three-level sharding. No torch.

Messages are those of `sharding.row_codec`, padding included. Bytes are counted per link level, as in
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
from torchtitan_scape.topology.machines import Links
from torchtitan_scape.topology.traffic import LevelSize, Stage, all_reduce_stages, spanned, stage_seconds

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

    def copies(self, is_coded: bool) -> int:
        """Return how many times the messages of a reduction are in memory at once: sent, received, and, where raw parts
        follow the codes, the codes alone.
        """
        return 3 if is_coded and any(len(shape) == 1 for shape in self.shapes) else 2

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
        row, as rings over the whole axis. A ring is as fast as its slowest link. Of each node one rank sends to the
        next node, by NCCL's several rings with the bandwidth of all of its ranks.
        """
        if not self.active:
            levels = spanned(layout.hierarchy(layout.model_group(0)))
            entries = len(layout.shard_group(0)) * sum(row.entries for row in rows)
            seconds, inner = [(0.0, 0.0)], 1
            for level in levels:
                # An all-reduce of n FP32 values sends 8 n bytes in two rounds of the ring, as these three do.
                ring = [LevelSize(level.level, math.prod(one.size for one in levels))]
                latency, transfer = stage_seconds(all_reduce_stages(entries, ring), links)
                seconds.append((latency, transfer / (inner if level.level == "network" else 1)))
                inner *= level.size
            latency, transfer = map(max, zip(*seconds, strict=True))
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
                received = ranks * (row.copies(self.weights != "dense") - 1)
                messages.append((1 + received + forwarded) * message + 4.0 * ranks * row.entries)
            if self.sparse is not None:
                residual = 4.0 * ranks * BLOCK * self.sparse.blocks(row.shapes, row.names, ranks)  # of all ranks' rows
                kinds["shard residual"] = kinds.get("shard residual", 0.0) + residual
                messages.append(2 * self.sparse.values(row.shapes, row.names, ranks))
            if self.gradients:
                input_bytes = ranks * row.message_bytes(self.gradients[0], GRADIENTS_BLOCK, 4)
                sums = 4.0 * row.entries * (len(nodes) if self.hops == 2 else 1)
                messages.append(row.copies(True) * input_bytes + sums + 4.0 * ranks * row.entries)
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


# ------------------------------------------------------------------------------------------ three-level sharding


@dataclass(frozen=True)
class LevelsPlan:
    """Degrees of three-level sharding, and the bytes per entry of each message.

    See arXiv:2501.04266, from which this project deviates. Weights are sharded over w ranks, gradients over the g ranks
    of a node, masters and optimizer states over R = g * N ranks. n is the number of entries. Padding is neglected, as
    are norms and biases, which are never quantized. `coded` returns the bytes per entry of a block code.

    Attributes:
        weights, gradients, nodes: Degrees w, g, N.
        gathered: Bytes per entry of all-gathered weights.
        reduced: Bytes per entry of reduce-scattered gradients.
        summed: Bytes per entry of gradients summed between nodes; 0 if a method of the replicate axis exchanges them.
        update: Bytes per entry of the weight update.
        secondary: A rank keeps its part of the gathered weights as a message.
        stored: Bytes per entry of the weights that FSDP2 stores.
    """

    weights: int
    gradients: int
    nodes: int
    gathered: float = 2.0
    reduced: float = 4.0
    summed: float = 4.0
    update: float = 4.0
    secondary: bool = False
    stored: float = 2.0

    @property
    def sums(self) -> bool:
        """Whether gradients are summed between nodes here, so that optimizer states are sharded over the nodes."""
        return self.summed > 0

    def shards(self, layout: Layout) -> int:
        """Return the ranks over which masters and optimizer states are sharded."""
        return self.gradients * (self.nodes if self.sums else 1)

    def sent(self, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> dict[tuple[str, str], float]:
        """Return the bytes that a rank sends per step, as the mean over ranks, by (link level, kind).

        Args:
            layout: Layout whose shard axis has the g ranks.
            micro_batches: Micro-batches per step.
        """
        n, sent_bytes = _entries(rows, layout), dict[tuple[str, str], float]()
        per_micro_batch = self.micro_batch_bytes(n, mean_gathers(rows))
        for times, bytes_of in ((micro_batches, per_micro_batch), (1, self.step_bytes(n))):
            for (over, kind), sent in bytes_of.items():
                if sent:
                    key = self._level(over, layout), kind
                    sent_bytes[key] = sent_bytes.get(key, 0.0) + times * sent
        return sent_bytes

    def seconds(self, rows: Sequence[FlatRow], layout: Layout, links: Links, micro_batches: int) -> tuple[float, float]:
        """Return the seconds per step of the traffic that (overlaps with compute, does not).

        Each row incurs the latency of its stages.
        """
        n, gathers, groups = _entries(rows, layout), mean_gathers(rows), len(rows)
        w, g, seconds = self.weights, self.gradients, []
        steps = {"pair": w - 1, "node": g // w - 1, "network": self.nodes - 1}
        per_micro_batch = self.micro_batch_bytes(n, gathers)
        for times, bytes_of in ((gathers, per_micro_batch), (1.0, self.step_bytes(n))):
            stages = [
                Stage(self._level(over, layout), groups * steps[over] * (times if kind == "weights" else 1.0), sent)
                for (over, kind), sent in bytes_of.items()
                if sent
            ]
            seconds.append(sum(stage_seconds(stages, links)))
        return micro_batches * seconds[0], seconds[1]

    def _level(self, over: str, layout: Layout) -> str:
        """Return the level of the link from the first rank to another rank of its pair, node or network."""
        ends = {"pair": self.weights - 1, "node": self.weights, "network": self.gradients}
        return layout.level(0, ends[over])

    def micro_batch_bytes(self, n: float, gathers: float = 2.0) -> dict[tuple[str, str], float]:
        """Return the bytes that a rank sends per micro-batch by (scope, kind), as the mean over ranks.

        The scope is "pair" within the w ranks, or "node" for the rest of the node.

        Args:
            n: Number of entries.
            gathers: All-gathers of an entry per micro-batch: 2 if its module is resharded after the forward pass.
        """
        w, g = self.weights, self.gradients
        return {
            ("pair", "weights"): gathers * n * self.gathered * (w - 1) / w,
            ("pair", "gradients"): self.reduced * n * (w - 1) / g,
            ("node", "gradients"): self.reduced * n * (g - w) / g,
        }

    def step_bytes(self, n: float) -> dict[tuple[str, str], float]:
        """Return the bytes that a rank sends once per step by (scope, kind); the scope may also be "network"."""
        w, g = self.weights, self.gradients
        between_nodes = n / g * (self.nodes - 1) / self.nodes if self.sums else 0.0
        return {
            ("network", "gradients"): self.summed * between_nodes,
            ("network", "update"): self.update * between_nodes,
            ("node", "update"): self.update * n * (g - w) / (w * g),
        }

    def memory(self, optimizer: dict[str, float], rows: Sequence[FlatRow], layout: Layout) -> dict[str, float]:
        """Return the bytes per rank by kind. "shard messages" are the temporary buffers of the largest group.

        Args:
            optimizer: Bytes by kind of the method and the optimizer on one of `shards` shards, whose parameters are the
                masters. Kinds other than parameters and gradients are copied.
        """
        n = _entries(rows, layout)
        kinds = {"parameters": self.stored * n / self.weights, "gradients": 4.0 * n / self.gradients}
        kinds["masters"] = optimizer["parameters"]
        kinds |= {kind: value for kind, value in optimizer.items() if kind not in ("parameters", "gradients")}
        if self.sums:
            kinds["summed gradients"] = optimizer["gradients"]
        if self.secondary:
            kinds["secondary partition"] = self.gathered * n / self.weights
        messages = [0.0]
        for row in rows:
            # FP32 gradients by tensor and by receiver, or by receiver, with messages and sums.
            sent = row.copies(self.reduced < 4.0) * self.reduced + 4.0 / self.gradients
            messages.append(_entries([row], layout) * max(8.0 if self.weights > 1 else 0.0, 4.0 + sent))
        return kinds | {"shard messages": max(messages)}


def _entries(rows: Sequence[FlatRow], layout: Layout) -> float:
    """Return the entries of all ranks of a replica."""
    return float(len(layout.shard_group(0)) * sum(row.entries for row in rows))


def coded(bits: int, block: int) -> float:
    """Return the bytes per entry of a block code with FP32 scales."""
    return bits / 8 + 4 / block
