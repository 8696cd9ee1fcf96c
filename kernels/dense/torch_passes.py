"""Dense AdamS and Adam with a frozen variance in plain PyTorch, tensor by tensor."""

from torch import Tensor

from torchtitan_scape.kernels.common.flat import Flat
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.dense.reference import adams_update_, frozen_adam_update_


class TorchAdams:
    """Dense AdamS with `kernels.dense.reference`."""

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        rates: list[Rates],
        steps: Tensor,
        applied: Tensor,
    ) -> None:
        """Update all parameters in place.

        Args:
            parameters: Local shards, any floating-point dtype.
            gradients: Contiguous, one per parameter.
            moments: First moments, in the order of the parameters; written.
            rates: Hyper-parameters of each parameter.
            steps: float64 (len(parameters),), applied steps of each parameter, this one included.
            applied: bool (); nothing is written if it is false.
        """
        for parameter, gradient, moment, r, step in zip(parameters, gradients, moments, rates, steps, strict=True):
            flat, flat_moment = Flat(parameter), Flat(moment)
            adams_update_(
                flat.flat,
                gradient.float().view(-1),
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


class TorchFrozenAdam:
    """AdamW with a given first moment and a variance that does not change, with `kernels.dense.reference`."""

    def step(
        self,
        parameters: list[Tensor],
        momenta: list[Tensor],
        moments: list[Tensor],
        variances: list[Tensor],
        rates: list[Rates],
        updates: Tensor,
        applied: Tensor,
    ) -> None:
        """Update all parameters in place.

        Args:
            parameters: Local shards, any floating-point dtype; the update is computed in FP32.
            momenta: FP32 (n,), one per parameter, the new first moments divided by 1 - beta1.
            moments, variances: First and second moments, in the order of the parameters, all of one dtype for a
                parameter; the first ones are written.
            rates: Hyper-parameters of each parameter.
            updates: float64 (len(parameters),), updates of each variance.
            applied: bool (); nothing is written if it is false.
        """
        tensors = zip(parameters, momenta, moments, variances, rates, updates, strict=True)
        for parameter, momentum, moment, variance, r, count in tensors:
            flat, flat_moment = Flat(parameter), Flat(moment)
            frozen_adam_update_(
                flat.flat,
                momentum,
                flat_moment.flat,
                variance.float().reshape(-1),
                lr=r.lr,
                beta1=r.beta1,
                eps=r.eps,
                weight_decay=r.weight_decay,
                bias_correction=1 - r.beta2**count,
                applied=applied,
            )
            flat.store()
            flat_moment.store()
