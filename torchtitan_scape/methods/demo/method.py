"""DeMo: exchange of the largest DCT components of the momentum; the other components remain in the local momentum.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (2024), arXiv:2411.19870.
"""

import torch
from torch import Tensor

from torchtitan_scape.kernels.backends import cosine_passes
from torchtitan_scape.kernels.topk.layout import MessageLayout, divisor_grid
from torchtitan_scape.methods.base import ResidualMethod
from torchtitan_scape.methods.demo.options import DemoOptions
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.topk.method import TopkMessages


class Demo(ResidualMethod):
    """One step (the paper's Algorithm 1, without the learning rate in the momentum, since sign descent ignores scale):

    1. m = beta m + gradient. C is the orthonormal two-dimensional DCT-II of each tile of m.
    2. q contains the k largest |C| of each tile, ties to the lower index. Its inverse transform is subtracted from m.
    3. All-gather one message per replica: q in FP32 or as signs and the mean |q| of the tensor, and encoded offsets.
    4. The mean of each component is taken over the replicas that sent it, in replica order. The synchronized gradient
       is the inverse transform of the means.

    The intended optimizer is SignSGD, which ignores the scale of the gradient. With another optimizer the method is
    top-k in the DCT basis. All parameters are compressed, in tiles of the local shard. Each replica holds N messages at
    once.
    """

    def __init__(self, context: MethodContext, options: DemoOptions) -> None:
        super().__init__(context, options, compresses_vectors=True)  # the momenta are the residuals
        self._grids = [divisor_grid(tuple(context.shards[i].local_shape), options.chunk) for i in self.sparse]
        selected = [min(options.k, grid.size) for grid in self._grids]
        self._device = context.shards[0].device
        layout = MessageLayout(self._grids, selected, options.message_code)
        self._passes = cosine_passes(self.backend, layout, self._device)
        self._messages = TopkMessages(layout, self.backend)

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        non_empty, beta = [gradients[i] for i in self.sparse], self.options.beta
        if self.take_full_exchange_request() or not non_empty:
            return self.exchange_all(gradients, info, beta)
        message, values = self._messages.allocate(self._device)
        self._passes.select(self.residuals, non_empty, beta, self.context.gradient_scale, info.applied, message, values)
        if self._messages.layout.code != "float32":
            self._messages.encode(message, values)
        received = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=self._device)
        self.collectives.all_gather(received, message, kind="payload").wait()
        received = received.view(self.collectives.replicas, -1)
        mean_ = self._messages.passes.mean_
        self.collectives.write_once(non_empty, lambda means: mean_(means, received, over_senders=True))
        self._passes.inverse_(non_empty)
        return gradients

    def density(self) -> float:
        return sum(self._messages.layout.counts) / max(1, sum(shard.size for shard in self.context.shards))
