"""Dense AdamS in plain PyTorch, tensor by tensor."""

from torch import Tensor

from kernels.common.flat import Flat
from kernels.common.rates import Rates
from kernels.dense.reference import adams_update_


class TorchAdams:
    """Dense AdamS on `kernels.dense.reference`."""

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        rates: list[Rates],
        steps: Tensor,
        applied: Tensor,
    ) -> None:
        """One step.

        Args:
            parameters, moments: local shards, written; gradients: flat.
            steps: float64 (len(parameters),), applied steps of each, this one included.
            applied: bool (); false writes nothing.
        """
        for parameter, gradient, moment, r, step in zip(parameters, gradients, moments, rates, steps, strict=True):
            flat, flat_moment = Flat(parameter), Flat(moment)
            adams_update_(
                flat.flat,
                gradient.float(),
                flat_moment.flat,
                lr=r.lr,
                betas=(r.beta1, r.beta2),
                eps=r.eps,
                weight_decay=r.weight_decay,
                bias_corrections=(1 - r.beta1**step, 1 - r.beta2**step),
                applied=applied,
            )
            flat.store()
            flat_moment.store()
