"""Top-k of the gradient with error feedback: every replica sends its own largest entries to all others.

Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent" (2014). Convergence with top-k: Stich, Cordonnier,
Jaggi, "Sparsified SGD with Memory" (2018). The SCAPE and Radius papers use this method as a baseline.
"""

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import flat
from torchtitan_scape.kernels.common.launching import LatestResult
from torchtitan_scape.kernels.scape.blocks import density_at
from torchtitan_scape.kernels.topk.layout import MessageLayout, block_grid, selected_per_block
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.topk.messages import TopkMessages
from torchtitan_scape.methods.topk.options import TopkOptions


class Topk(GradientMethod):
    """One step, with x = decay * residual + gradient (all in mean units):

    1. Select the k = max(1, round(density * entries)) largest |x| of each block, ties to the lower index.
    2. All-gather one message per replica, with their values (encoded by `code`) and encoded offsets.
    3. The synchronized gradient is the sum of the decoded messages, in replica order, divided by the number of replicas
       or by the number of replicas that sent the entry. It is zero elsewhere.
    4. The residual is x minus the decoded values that were sent.

    Parameters of one dimension are uncompressed unless selection is "tile", and all-reduced. Each replica holds N
    messages at once.
    """

    def __init__(self, context: MethodContext, options: TopkOptions) -> None:
        super().__init__(context, options)
        shards = context.shards
        sparse = [shard for shard in shards if shard.parameter.ndim > 1 or options.selection == "tile"]
        self._sparse = [i for i, shard in enumerate(shards) if shard in sparse and shard.size]
        self._uncompressed = [i for i in range(len(shards)) if i not in self._sparse]
        self._grids = [
            block_grid(tuple(shards[i].local_shape), options.selection, options.block_size) for i in self._sparse
        ]
        self._pending = ErrorFeedback.of(sparse)  # includes empty shards: a checkpoint needs the states of all ranks
        self._residuals = [self._pending.tensors[shards[i].name] for i in self._sparse]
        self._device = shards[0].device
        self._messages = LatestResult[TopkMessages]()

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        sparse, uncompressed = ([gradients[i] for i in each] for each in (self._sparse, self._uncompressed))
        density = self._density(info.number)
        if density >= 1.0 or not sparse:
            self.scale_to_mean(gradients)
            if sparse:
                torch._foreach_add_(flat(sparse), flat(self._residuals), alpha=self.options.decay)
            self.collectives.all_reduce_chunked(flat(gradients))
            self._pending.clear(info.applied)
            return gradients
        messages, scale, residuals = self._messages_at(density), self.context.gradient_scale, self._residuals
        message, values = messages.allocate(self._device)
        messages.passes.select(residuals, sparse, self.options.decay, scale, info.applied, message, values)
        decoded = None if self.options.code == "float32" else messages.encode(message, values)
        received = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=message.device)
        handle = self.collectives.all_gather(received, message, kind="payload")
        self.scale_to_mean(uncompressed)
        self.collectives.all_reduce_chunked(flat(uncompressed))
        if decoded is not None:
            messages.passes.keep_(residuals, message, values.sub_(decoded), info.applied)
        handle.wait()
        received = received.view(self.collectives.replicas, -1)
        over_senders = self.options.divisor == "senders"
        self.collectives.write_once(sparse, lambda means: messages.passes.mean_(means, received, over_senders))
        return gradients

    def states(self) -> list[State]:
        return [self._pending.state()]

    def density(self) -> float:
        entries = sum(shard.size for shard in self.context.shards)
        sent = sum(self._layout_at(self.options.density).counts)
        return (sent + sum(self.context.shards[i].size for i in self._uncompressed)) / max(1, entries)

    def _density(self, number: int) -> float:
        """Return the density of step `number`; 1 for a dense step."""
        if self.take_full_exchange_request() or number <= self.options.start:
            return 1.0
        target = self.options.density
        density = density_at(number - self.options.start, target, self.options.density_warmup_steps)
        if density <= target:
            return density
        message_bytes = self._layout_at(density).nbytes
        entries = sum(grid.entries for grid in self._grids)
        larger = self.collectives.gathered_bytes(message_bytes) > self.collectives.reduced_bytes(entries)
        return 1.0 if larger else density

    def _layout_at(self, density: float) -> MessageLayout:
        return MessageLayout(self._grids, selected_per_block(self._grids, density), self.options.code)

    def _messages_at(self, density: float) -> TopkMessages:
        """Return the messages of a density, which are built again when it changes."""
        return self._messages.get(density, lambda: TopkMessages(self._layout_at(density), self.backend))
