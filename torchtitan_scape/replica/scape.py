"""SCAPE as an ordinary optimizer: AdamS's rates and `ScapeMethod` in one constructor."""

from collections.abc import Iterable
from typing import Any, Literal

from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.scape.method import ScapeMethod
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.replicate import RealReplicas, replicas_of
from torchtitan_scape.topology.in_process import OneReplica


class Scape(ReplicaOptimizer):
    """AdamS with a sparse, delayed-mask exchange of the first moment over replicas.

    Use it without DDP: it synchronizes the replicas. The start is that of replica 0: its parameters are broadcast. See
    `ScapeMethod` for the dtypes of the parameters, and `ReplicaOptimizer` for the step.

    Args:
        params: named parameters (`model.named_parameters()`), or dicts of them with their own `lr`, `weight_decay`,
            `betas` or `eps`; plain tensors or DTensors.
        options: see `ScapeOptions`, or a dictionary of its values.
        replicas, max_norm and others: see `replicate`; `ReplicaCollectives` are accepted as replicas, too.

    Raises:
        ValueError: for arguments out of range, integer parameters, and replicas that disagree on any of this.
    """

    methods: list[ScapeMethod]  # type: ignore[assignment]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        options: ScapeOptions | dict[str, Any] | None = None,
        replicas: RealReplicas = None,
        *,
        max_norm: float | None = 1.0,
        reduction: Literal["mean", "sum"] = "mean",
        max_skipped_steps: int = 10,
        kernels: str = "auto",
    ) -> None:
        rates = AdamS(params, lr, betas, eps, weight_decay, kernels, allocate_state=False)
        super().__init__(
            rates,
            ScapeOptions(**options) if isinstance(options, dict) else options or ScapeOptions(),
            OneReplica(replicas_of(replicas, collect_shards(rates.param_groups))),
            max_norm=max_norm,
            reduction=reduction,
            max_skipped_steps=max_skipped_steps,
            kernels=kernels,
        )

    @property
    def method(self) -> ScapeMethod:
        return self.methods[0]
