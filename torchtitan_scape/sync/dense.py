"""The dense baseline: every gradient, in FP32."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan_scape.sync.base import Message, Method, Step
from torchtitan_scape.sync.options import MethodOptions


@dataclass
class DenseOptions(MethodOptions):
    """[sync.dense]: nothing to set."""

    section: ClassVar[str] = "sync.dense"


class Dense(Method):
    """All-reduces the gradients over replicas, in chunks. Nothing is left pending."""

    def synchronize(self, gradients: list[Tensor], step: Step) -> list[Tensor]:
        # Gradients that are to be summed are summed: scaled by N and averaged they would be rounded once more.
        divisor = self.collectives.replicas / self.setting.scale
        self.collectives.all_reduce_chunked(gradients, mean=False)
        if divisor != 1.0:
            torch._foreach_div_(gradients, divisor)
        return gradients

    def messages(self) -> list[Message]:
        return [Message("all_reduce", sum(shard.size for shard in self.setting.shards))]
