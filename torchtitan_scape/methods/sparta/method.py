"""SPARTA: local updates, and in every step an average of a part of the parameters.

Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging" (2025),
https://openreview.net/forum?id=stFPf3gzq1. The paper draws the part at random and sends it in FP32. This implementation
cycles through fixed parts, so that the interval between two averages of an entry is bounded, and sends one bit per
entry; the quantization error stays in the parameters of the replica (error feedback).
"""

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import StoredTensors, stored
from torchtitan_scape.kernels.backends import block_code, exchange_passes
from torchtitan_scape.kernels.exchange.layout import FIRST, OWNER_ERROR, SECOND, BlockSlice
from torchtitan_scape.methods.base import LocalMethod
from torchtitan_scape.methods.coded_exchange import CodedChunk, CodedExchange
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.sparta.options import BLOCK, SpartaOptions, count_blocks, slices_of_group
from torchtitan_scape.topology.chunks import double_buffered
from torchtitan_scape.topology.partition import chunks_of


class Sparta(LocalMethod):
    """Average of the block groups of a step (theta_i: the parameters of replica i, N: the number of replicas).

    After the optimizer's update, for the entries of these groups:

    1. Each replica encodes D_i = anchor - theta_i with a quantization error E_i. The owner of a slice encodes the mean
       of the received messages for all replicas: D is the decoded mean, F its quantization error.
    2. anchor -= D; theta_i = anchor - E_i. The owner also keeps F, weighted by N.

    The blocks of all shards are numbered consecutively, and block i belongs to group i modulo `interval`. A step
    averages the next group; a step of the warm-up averages several, the first one all. The order of the groups never
    changes, so that no entry waits for more than one round. A skipped step changes nothing, and its groups wait for
    the next round.

    With few replicas, unless the code is "1bit_unbiased", the owner subtracts N F from its parameters. The pending
    update of an entry is then anchor - theta_i, and the anchor is the only state. Otherwise N F would move the owner's
    parameters too far: F is then a separate state, which is added to the next mean before it is encoded. In a few
    trials the first rule gave the lower loss with 4 replicas, and the second with 8 and 16. If the replicas of a node
    are summed before they are encoded, E_i belongs to the sum, is stored on one rank, and is part of this state.

    A group is divided into the same chunks in every step, including the warm-up, so that the owners never change. Only
    a full exchange, which leaves no errors, has others.
    """

    def __init__(self, context: MethodContext, options: SpartaOptions) -> None:
        super().__init__(context, options)
        shards, replicas = context.shards, self.collectives.replicas
        self._anchors = {s.name: stored(s.parameter).detach().to(torch.float32, copy=True) for s in shards}
        self._owner_error: dict[str, Tensor] = {}
        code = None
        if options.code != "float32" and replicas > 1:
            code = block_code(self.backend, options.encoding(replicas), BLOCK)
            if options.keeps_owner_error(replicas):
                self._owner_error = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}
        passes = exchange_passes(self.backend, (stored(s.parameter).dtype for s in shards))
        of_tensors = shards[0].device, len(shards)
        self._exchange = CodedExchange(self.collectives, code, BLOCK, *of_tensors, passes, repeats=True, subtracts=True)
        warmup = options.warmup_steps if options.warmup_steps >= 0 else context.part_of_run(20, "warmup_steps")
        # Number of groups in each step of the warm-up, and the first group of each step.
        self._group_counts = [round(options.interval ** (1 - done / warmup)) for done in range(warmup)]
        self._first_groups = list(accumulate(self._group_counts, initial=1))
        # Blocks have the numbers that they have without a pipeline.
        blocks, stage = self.collectives.gather_from_stages(count_blocks([s.size for s in context.shards]))
        self._first_block = sum(blocks[:stage])
        # Exchanges in FP32 have buffers, and smaller chunks.
        limit = partial(self.collectives.chunk_limit, sum(s.size for s in shards))
        self._chunks = {
            encodes: [self._chunks_of(group, most, encodes) for group in range(options.interval)]
            for encodes, most in ((True, limit(code)), (False, limit()))
        }
        self._stored_tensors = StoredTensors(shards)
        for kind, tensors in ((FIRST, self._anchors), (OWNER_ERROR, self._owner_error)):
            if tensors:
                self._exchange.set(kind, [tensors[s.name] for s in shards])
        # Groups of which another layout may have had other owners, after a load, and those of the last step.
        self._loaded_groups: set[int] = set()
        self._sent_groups: set[int] = set()

    def _chunks_of(self, group: int, limit: int, encodes: bool) -> list[CodedChunk]:
        """Return the chunks of a block group."""
        interval, coded = self.options.interval, []
        parts = slices_of_group([s.size for s in self.context.shards], interval, group, self._first_block)
        for chunk in chunks_of([part.entries for part in parts], limit, BLOCK):
            slices = []
            for s in chunk.slices:
                part, blocks = parts[s.tensor], s.first // BLOCK * interval
                first, stride = (part.first + blocks) * BLOCK, interval * BLOCK
                slices.append(BlockSlice(part.shard, first, s.length, stride, s.at // BLOCK))
            coded.append(self._exchange.chunk(slices, chunk.entries, encodes))
        return coded

    def block_groups(self, number: int) -> range:
        """Return the groups of a step, as numbers that increase from round to round, to be taken modulo `interval`."""
        warmup, done = len(self._group_counts), number - 1
        first = self._first_groups[min(done, warmup)] + max(0, done - warmup)
        return range(first, first + (self._group_counts[done] if done < warmup else 1))

    def exchange(self, info: StepInfo) -> None:
        """Exchange the chunks with two buffers: one is filled while the other is in flight."""
        flush = self.take_full_exchange_request()
        self._exchange.set(SECOND, self._stored_tensors())
        numbers = range(self.options.interval) if flush else self.block_groups(info.number)
        groups = [number % self.options.interval for number in numbers]
        started = (
            self._exchange.start(chunk, not flush, errors_elsewhere=group in self._loaded_groups)
            for group in groups
            for chunk in self._chunks[not flush][group]
        )
        double_buffered((sent.handle, partial(self._exchange.finish, sent, info.applied)) for sent in started)
        self._sent_groups = set(groups)

    def finish_previous_step(self, applied: bool) -> None:
        if applied:
            self._loaded_groups -= self._sent_groups
        self._sent_groups = set()

    def states(self) -> list[State]:
        states = [State("anchor", self._anchors, per_replica=False, on_migration="model")]
        if self._owner_error:
            states.append(State("owner_error", self._owner_error, per_replica=True, on_migration="displacement"))
        return states

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        for error in self._owner_error.values():
            error.zero_()
        self._loaded_groups, self._sent_groups = set(range(self.options.interval)), set()

    def density(self) -> float:
        return 1.0 / self.options.interval
