"""Top-k of the gradient with error feedback: every replica sends its own largest entries to all others.

Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent" (2014). Convergence with top-k: Stich, Cordonnier,
Jaggi, "Sparsified SGD with Memory" (2018). The SCAPE and Radius papers use this method as a baseline.
"""

from functools import partial

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import split
from torchtitan_scape.kernels.backends import choose_backend, topk_passes
from torchtitan_scape.kernels.scape.blocks import density_at
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.topk.blocks import block_grid, selected_per_block, topk_message_bytes
from torchtitan_scape.methods.topk.messages import TopkMessages, valid_offsets
from torchtitan_scape.methods.topk.options import TopkOptions


class Topk(GradientMethod):
    """One step, with x = decay * residual + gradient (all in mean units):

    1. Select the k = max(1, round(density * entries)) largest |x| of each block, ties to the lower index.
    2. All-gather one message per replica, with their values (encoded by `code`) and encoded offsets.
    3. The synchronized gradient is the sum of the decoded messages, in replica order, divided by the number of replicas
       or by the number of replicas that sent the entry. It is zero elsewhere.
    4. The residual is x minus the decoded values that were sent.

    The uncompressed parameters (`dense_names`, and those of one dimension unless selection is "tile") are all-reduced.
    Each replica holds N messages at once.
    """

    def __init__(self, context: MethodContext, options: TopkOptions) -> None:
        super().__init__(context, options)
        shards = context.shards
        sparse, dense = split(shards, options.dense_names)
        if options.selection == "tile":
            sparse = [*sparse, *(shard for shard in dense if shard.name not in options.dense_names)]
        self._sparse = [i for i, shard in enumerate(shards) if shard in sparse and shard.size]
        self._uncompressed = [i for i in range(len(shards)) if i not in self._sparse]
        self._grids = [
            block_grid(tuple(shards[i].local_shape), options.selection, options.block_size) for i in self._sparse
        ]
        self._pending = ErrorFeedback.of(sparse)  # includes empty shards: a checkpoint needs the states of all ranks
        self._residuals = [self._pending.tensors[shards[i].name] for i in self._sparse]
        self._backend = choose_backend(context.kernels, shards[0].device)
        self._passes = topk_passes(self._backend)

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        sparse = [gradients[i] for i in self._sparse]
        residuals = [residual.view(-1) for residual in self._residuals]
        density = self._density(info.number)
        if density >= 1.0 or not sparse:
            self.scale_to_mean(gradients)
            if sparse:
                torch._foreach_add_(sparse, residuals, alpha=self.options.decay)
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(info.applied)
            return gradients
        grids = self._grids
        messages = TopkMessages(grids, selected_per_block(grids, density), self.options.code, self._backend)
        for x, residual in zip(sparse, residuals, strict=True):
            self._passes.accumulate_(residual, x, self.options.decay, self.context.gradient_scale, info.applied)
        self.scale_to_mean([gradients[i] for i in self._uncompressed])
        # The residuals contain x. In a skipped step they keep their values, and what is sent is not used.
        chosen = [self._passes.select(*each) for each in zip(residuals, grids, messages.selected, strict=True)]
        values, offsets = [v for v, _ in chosen], [o for _, o in chosen]
        valid = [valid_offsets(o, grid) for o, grid in zip(offsets, grids, strict=True)]
        message, decoded = messages.encode(values, offsets, valid)
        received = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=message.device)
        handle = self.collectives.all_gather(received, message, kind="payload")
        self.collectives.all_reduce_chunked([gradients[i] for i in self._uncompressed])
        errors = torch._foreach_sub(values, decoded)
        for residual, grid, at, error in zip(residuals, grids, offsets, errors, strict=True):
            self._passes.keep_(residual, grid, at, error, info.applied)
        handle.wait()
        received = received.view(self.collectives.replicas, -1)
        blocks, over_senders = messages.decode_blocks(received), self.options.divisor == "senders"
        for i, x in enumerate(sparse):
            mean_ = partial(messages.mean_, messages=received, tensor=i, decoded=blocks, over_senders=over_senders)
            self.collectives.write_once(x, mean_)
        return gradients

    def states(self) -> list[State]:
        return [self._pending.state()]

    def density(self) -> float:
        entries = sum(shard.size for shard in self.context.shards)
        selected = selected_per_block(self._grids, self.options.density)
        sent = sum(grid.count(k) for grid, k in zip(self._grids, selected, strict=True))
        return (sent + sum(self.context.shards[i].size for i in self._uncompressed)) / max(1, entries)

    def _density(self, number: int) -> float:
        """Return the density of step `number`; 1 for a dense step."""
        if self.take_full_exchange_request() or number <= self.options.start:
            return 1.0
        target = self.options.density
        density = density_at(number - self.options.start, target, self.options.density_warmup_steps)
        entries = sum(residual.numel() for residual in self._residuals)
        message_bytes = topk_message_bytes(self._grids, selected_per_block(self._grids, density), self.options.code)
        larger = self.collectives.gathered_bytes(message_bytes) > self.collectives.reduced_bytes(entries)
        return 1.0 if density > target and larger else density
