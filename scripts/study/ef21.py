"""The trainer with EF21-Muon (Gruntkowska et al., arXiv:2510.00643) in the place of quantized_update's gradients.

Replica i keeps the momentum m_i of its own gradients and an estimate h_i, sends C(m_i - h_i) with the code of
`quantized_update`, and adds the decoded message to h_i. The owner of a matrix steps along the orthogonalized mean of
all h_i. With e_i = m_i - h_i after a message, the next one is C(m_i' - m_i + e_i): an exchange of increments of the
momenta, with the quantization errors as residuals. The owner adds their decoded means up. Weights and the parameters of
AdamW are exchanged as by `quantized_update`. Nothing is clipped: increments must not be, and both optimizers divide by
the size of the gradient.

    python -m scripts.study.ef21 --job.config_file=...     # arguments of torchtitan_scape.train
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.quantized_update import method as quantized_update
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.train import main


class Ef21Muon(quantized_update.QuantizedUpdate):
    """`QuantizedUpdate` with increments of local momenta as the gradients of Muon's matrices."""

    def __init__(self, context: MethodContext, options: Any) -> None:
        super().__init__(replace(context, max_norm=None), options)
        if not isinstance(context.optimizer, Muon) or options.interval > 1:
            raise ValueError("EF21-Muon needs [optimizer] name = 'Muon' and an interval of 1")
        if isinstance(self.owned.optimizer, Muon):  # that of a replica without matrices is AdamW
            self.owned.optimizer._passes = _Sums(self.owned.optimizer._passes)
        self._momenta = {
            i: torch.zeros(shard.size, dtype=torch.float32, device=shard.device)
            for i, shard in enumerate(context.shards)
            if context.optimizer.updates(shard)
        }

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        beta = self.context.optimizer.param_groups[0]["betas"][0]
        for i, momentum in self._momenta.items():
            gradient = gradients[i].view(-1)
            gradient.sub_(momentum).mul_(1.0 - beta)
            momentum.add_(gradient)
        super().step(gradients, info)


class _Sums:
    """Muon's passes with sums of the gradients in the place of their averages, and without Nesterov's step."""

    def __init__(self, passes: Any) -> None:
        self.move = passes.move

    def average(
        self,
        gradients: Sequence[Tensor],
        sums: Sequence[Tensor],
        momenta: Sequence[float],
        applied: Tensor,
        factor: Tensor | None,
        needed: Sequence[bool],
    ) -> list[Tensor]:
        """Add the gradients to the sums, if `applied`, and return the sums in BF16."""
        for gradient, total in zip(gradients, sums, strict=True):
            total.add_(gradient.masked_fill(~applied, 0.0))
        return [total.bfloat16() for total in sums]


if __name__ == "__main__":
    quantized_update.QuantizedUpdate = Ef21Muon  # type: ignore[misc]
    main()
