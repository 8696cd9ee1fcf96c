"""Muon for the matrices of a model's blocks, AdamW for the rest, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), kellerjordan.github.io/posts/muon; the
step's length is that of Liu et al., "Muon is Scalable for LLM Training" (2025), arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as Cut
from torch.optim import Optimizer

from torchtitan_scape.core.hyperparameters import check_hyperparameters
from torchtitan_scape.core.parameters import Shard, collect_shards, is_slice, local
from torchtitan_scape.core.workloads import layer_of
from torchtitan_scape.optimizers.cost import ITERATIONS
from torchtitan_scape.optimizers.matrix_exchange import MatrixExchange

A, B, C = 3.4445, -4.7750, 2.0315  # of Jordan et al.


class Muon(Optimizer):
    """PyTorch's Muon and AdamW, on gradients that are already synchronised; decoupled weight decay.

    Muon steps along momentum whose singular values are made equal, by five Newton-Schulz iterations in BF16. It is for
    the matrices of the blocks (two dimensions, a layer's number in the name): embedding, output, norms and biases
    are AdamW's, as Muon's authors and PyTorch's documentation advise. One learning rate serves both: a step of Muon is
    as long as one of AdamW usually is, 0.2 lr in the mean square (PyTorch's `match_rms_adamw`).

    Matrices that FSDP2 cuts are dealt out to the ranks of their replica, in BF16, for the iterations: each makes those
    of its own, to the bits of a matrix that was never cut. A step is then a collective call of these ranks.

    Args:
        params: (name, parameter), all in one group; plain tensors or DTensors, which may be cut by rows.
        betas: the first is Muon's momentum, too, which is Nesterov's.
        eps: AdamW's. Muon's own, which keeps a gradient of zeros from 0 / 0, is PyTorch's.
        fused, foreach: AdamW's implementation.
        count: is told the bytes that go to each rank of the replica, as of `MatrixExchange`.

    State of every parameter is "step" and "exp_avg", which is Muon's momentum, FP32; AdamW has "exp_avg_sq" besides.
    A parameter without a gradient, which it must then have on no rank of the replica, is left as it is.

    Raises ValueError for a model without such matrices, and for matrices that are cut otherwise.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool = False,
        foreach: bool = False,
        count: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        assert len(self.param_groups) == 1
        shards = collect_shards(self.param_groups)
        hidden = [shard for shard in shards if is_hidden(shard)]
        rest = [shard.parameter for shard in shards if not is_hidden(shard)]
        if not hidden:
            raise ValueError(
                f"Muon is for matrices of numbered layers, and none of {shards[0].name!r} to {shards[-1].name!r} is "
                "one; set [optimizer] name = 'AdamW'"
            )
        # Those that are dealt out together are of like size, so that ranks work for as long as each other.
        self._hidden = sorted(hidden, key=lambda shard: -shard.entries)
        self._dealer = MatrixExchange(_group_of(hidden), count)
        self._adamw = torch.optim.AdamW(rest, fused=fused, foreach=foreach) if rest else None
        for shard in shards:
            parameter = shard.parameter
            step = torch.zeros((), dtype=torch.float32, device=local(parameter).device if fused else "cpu")
            kinds = ("exp_avg",) if is_hidden(shard) else ("exp_avg", "exp_avg_sq")
            moments = {kind: torch.zeros_like(parameter, dtype=torch.float32).detach() for kind in kinds}
            self.state[parameter] = {"step": step, **moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the count of steps stays where it was."""
        devices = {parameter: state["step"].device for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        for parameter, device in devices.items():
            self.state[parameter]["step"] = self.state[parameter]["step"].to(device, torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. Returns the closure's value, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        present, together = [s for s in self._hidden if s.parameter.grad is not None], self._dealer.ranks
        for first in range(0, len(present), together):
            self._step_of(present[first : first + together], group)
        if self._adamw is not None:
            self._adamw.state = self.state
            rates = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            self._adamw.param_groups[0].update(rates)
            self._adamw.step()
        return loss

    def _step_of(self, shards: Sequence[Shard], group: dict[str, Any]) -> None:
        """Of as many matrices as there are ranks."""
        lr, momentum = group["lr"], group["betas"][0]
        directions = []
        for shard in shards:
            gradient, state = local(shard.parameter.grad), self.state[shard.parameter]  # type: ignore[arg-type]
            average = local(state["exp_avg"]).lerp_(gradient, 1 - momentum)
            directions.append(gradient.lerp(average, momentum).bfloat16())
            state["step"] += 1
        self._dealer.work(directions, [shard.parameter.shape for shard in shards], orthogonalised)
        for shard, direction in zip(shards, directions, strict=True):
            own = local(shard.parameter).detach().mul_(1 - lr * group["weight_decay"])
            own.add_(direction, alpha=-lr * 0.2 * math.sqrt(max(shard.parameter.shape)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """BF16 (a, b): the matrix after Newton-Schulz iterations from a norm of 1, which bring singular values near 1.

    x = A x + (B g + C g^2) x, g = x x^T, of the matrix or, where it is higher than wide, its transpose; as PyTorch's
    Muon, which has them inside its step alone, with every product rounded to BF16. On a CPU products of the same BF16
    numbers are made in FP32: BF16 ones take 1.5 to 2.5 times as long with BF16 instructions and ten and more without.
    A sum may then round the other way, by the order of its addends.
    """
    high = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if high else matrix
    dtype = products_dtype(matrix.device)

    def rounded(product: Tensor) -> Tensor:
        return product.bfloat16().to(dtype)

    x = (x / x.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = rounded(x @ x.T)
        x = rounded(torch.addmm(x, rounded(torch.addmm(gram, gram, gram, beta=B, alpha=C)), x, beta=A))
    return (x.T if high else x).bfloat16()


def products_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def is_hidden(shard: Shard) -> bool:
    """Whether Muon updates it: a matrix of a block."""
    return shard.parameter.ndim == 2 and layer_of(shard.name) is not None


def _group_of(shards: Sequence[Shard]) -> ProcessGroup | None:
    """The group over which all of them are cut by rows; None where they are whole. Raises ValueError for other cuts."""
    groups: dict[ProcessGroup | None, str] = {}
    for shard in shards:
        parameter, cuts = shard.parameter, []
        if isinstance(parameter, DTensor):
            sizes = parameter.device_mesh.shape
            # Behind column-wise tensor parallelism FSDP2's placement is no `Shard` to `is_shard`.
            cuts = [
                (axis, p) for axis, p in enumerate(parameter.placements) if not p.is_replicate() and sizes[axis] > 1
            ]
        if is_slice(parameter) or len(cuts) > 1 or any(placement != Cut(0) for _, placement in cuts):
            raise ValueError(
                f"Muon needs matrices that are whole or cut by rows alone, and {shard.name!r} of "
                f"{tuple(parameter.shape)} is not; train without tensor parallelism and [sharding.levels], or with "
                "[optimizer] name = 'AdamW'"
            )
        groups[parameter.device_mesh.get_group(cuts[0][0]) if cuts else None] = shard.name
    if len(groups) > 1:
        raise ValueError(
            f"Muon needs matrices that are cut alike, and {' and '.join(map(repr, groups.values()))} differ"
        )
    (group,) = groups
    return group
