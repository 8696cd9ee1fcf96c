"""Muon for the matrices of a model's blocks and AdamW for the other parameters, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), kellerjordan.github.io/posts/muon; the
step size is that of Liu et al., "Muon is Scalable for LLM Training" (2025), arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as Cut
from torch.optim import Optimizer

from torchtitan_scape.core.hyperparameters import check_hyperparameters
from torchtitan_scape.core.parameters import Shard, collect_shards, is_slice, local
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.core.workloads import BLOCK_LISTS, layer_of
from torchtitan_scape.optimizers.cost import ITERATIONS
from torchtitan_scape.optimizers.matrix_exchange import MatrixExchange, ReplicaShare

A, B, C = 3.4445, -4.7750, 2.0315  # Coefficients of Jordan et al.


class Muon(Optimizer):
    """PyTorch's Muon and AdamW on synchronized gradients, with decoupled weight decay.

    Muon steps along its momentum orthogonalized by five Newton-Schulz iterations in BF16. It updates the matrices of
    the blocks (two dimensions, named like `layers.0.weight`, see `BLOCK_LISTS`). AdamW updates embedding, output, norms
    and biases, as recommended by Muon's authors and PyTorch's documentation. Both use one learning rate: the root mean
    square of a Muon step is 0.2 lr, about that of AdamW (PyTorch's `match_rms_adamw`).

    Matrices sharded by FSDP2 are exchanged within the replica in BF16, so that each rank iterates on whole matrices,
    bitwise equal to an unsharded run. A step is then collective over these ranks. With `share`, replicas with equal
    gradients also divide the matrices, and gather the results in BF16, with equal bits again.

    With `fused`, a step is skipped on the device if `found_inf` is set, as by `torch.amp.GradScaler`.

    The state of every parameter is "step" and "exp_avg", FP32, which is Muon's momentum; AdamW also has "exp_avg_sq". A
    parameter without a gradient is not changed; the gradient must then be missing on all ranks of the replica.

    Args:
        params: (name, parameter), in one or several param groups; plain tensors or DTensors, which may be sharded by
            rows.
        lr: Learning rate.
        betas: The first is also Muon's (Nesterov) momentum.
        eps: AdamW's epsilon. Muon uses PyTorch's, which prevents 0 / 0 for a zero gradient.
        weight_decay: Decoupled weight decay.
        fused, foreach: AdamW's implementation.
        count: Receives the bytes sent to each rank of the replica; see `MatrixExchange`.
        share: Divides the matrices among replicas; None for no division.

    Raises:
        ValueError: The model has no such matrices, or they are not sharded by rows.
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
        share: ReplicaShare | None = None,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        shards = collect_shards(self.param_groups)
        for shard in shards:
            if (dtype := shard.parameter.dtype) != torch.float32:
                raise ValueError(
                    f"Muon needs parameters in FP32, and {shard.name!r} is {dtype}; keep them in FP32 and compute in "
                    "BF16 by mixed precision or autocast"
                )
        hidden = [shard for shard in shards if is_hidden(shard)]
        rest = [
            [s.parameter for s in shards if s.group == i and not is_hidden(s)] for i in range(len(self.param_groups))
        ]
        self._rest_groups = [i for i, parameters in enumerate(rest) if parameters]
        if not hidden:
            raise ValueError(
                "Muon updates matrices of blocks, named like 'layers.0.weight', and none of "
                f"{shards[0].name!r} to {shards[-1].name!r} is one; rename the list of blocks to "
                f"{', '.join(BLOCK_LISTS[:-1])} or {BLOCK_LISTS[-1]}, or set [optimizer] name = 'AdamW'"
            )
        # Sorted by size, so that matrices exchanged together take about the same time.
        self.hidden = sorted(hidden, key=lambda shard: -shard.entries)
        self._exchange = MatrixExchange(_group_of(hidden), count)
        self._share = share or ReplicaShare()
        self._step_supports_amp_scaling = fused
        self._adamw = None
        if self._rest_groups:
            groups = [{"params": rest[i]} for i in self._rest_groups]
            self._adamw = torch.optim.AdamW(groups, fused=fused, foreach=foreach)
        for shard in shards:
            parameter = shard.parameter
            step = torch.zeros((), dtype=torch.float32, device=local(parameter).device if fused else "cpu")
            kinds = ("exp_avg",) if is_hidden(shard) else ("exp_avg", "exp_avg_sq")
            moments = {kind: torch.zeros_like(parameter, dtype=torch.float32).detach() for kind in kinds}
            self.state[parameter] = {"step": step, **moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does, but keep the step counters on their devices."""
        devices = {parameter: state["step"].device for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        for parameter, device in devices.items():
            self.state[parameter]["step"] = self.state[parameter]["step"].to(device, torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Return the closure's value, or None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        applied = None if found_inf is None else found_inf == 0
        present = [s for s in self.hidden if s.parameter.grad is not None]
        together = self._exchange.ranks * self._share.replicas
        for first in range(0, len(present), together):
            self._step_of(present[first : first + together], applied)
        if self._adamw is not None:
            if found_inf is not None:
                self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
            self._adamw.state = self.state
            for own, i in zip(self._adamw.param_groups, self._rest_groups, strict=True):
                own.update({key: self.param_groups[i][key] for key in ("lr", "betas", "eps", "weight_decay")})
            self._adamw.step()
        return loss

    @property
    def exchange_ranks(self) -> int:
        """Number of ranks over which every matrix is sharded."""
        return self._exchange.ranks

    def orthogonalize(self, shards: Sequence[Shard], matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return matrices orthogonalized, BF16. Collective over the ranks of the replica.

        Args:
            shards: At most `exchange_ranks` shards.
            matrices: This rank's rows of a matrix for each shard.
        """
        directions = [matrix.bfloat16() for matrix in matrices]
        self._exchange.work(directions, [shard.parameter.shape for shard in shards], orthogonalized)
        return directions

    def _step_of(self, shards: Sequence[Shard], applied: Tensor | None) -> None:
        """Update at most as many matrices as there are ranks in all replicas that share the work.

        Args:
            applied: bool (); if False, nothing changes. None for True.
        """
        ranks = self._exchange.ranks
        parts = [shards[first : first + ranks] for first in range(0, len(shards), ranks)]
        own = parts[self._share.replica] if self._share.replica < len(parts) else []
        directions = []
        for shard in shards:
            gradient, state = local(shard.parameter.grad), self.state[shard.parameter]  # type: ignore[arg-type]
            momentum = self.param_groups[shard.group]["betas"][0]
            with _masked(local(state["exp_avg"]), applied) as average:
                average.lerp_(gradient, 1 - momentum)
            if shard in own:
                directions.append(gradient.lerp(average, momentum).bfloat16())
            state["step"] += 1 if applied is None else applied.to(state["step"].device)
        if own:
            directions = self.orthogonalize(own, directions)
        local_shapes = [[shard.local_shape for shard in part] for part in parts]
        for shard, direction in zip(
            shards, self._share.gather(directions, local_shapes, shards[0].device), strict=True
        ):
            with _masked(local(shard.parameter).detach(), applied) as weight:
                group = self.param_groups[shard.group]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(direction, alpha=-group["lr"] * step_scale(shard))


def step_scale(shard: Shard) -> float:
    """Return the factor by which an orthogonalized matrix is multiplied besides the learning rate."""
    return 0.2 * math.sqrt(max(shard.parameter.shape))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return BF16 (a, b): the matrix, scaled to norm 1, after Newton-Schulz iterations that move singular values
    towards 1.

    x = A x + (B g + C g^2) x with g = x x^T, for the matrix or, if it has more rows than columns, its transpose. This
    equals PyTorch's Muon, which has no separate function for it, with every product rounded to BF16. On a CPU products
    of the BF16 numbers are computed in FP32: BF16 products take 1.5 to 2.5 times as long with BF16 instructions, and
    more than ten times without. Sums in another order may round differently.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    dtype = products_dtype(matrix.device)

    def to_bf16(product: Tensor) -> Tensor:
        return product.bfloat16().to(dtype)

    x = (x / x.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = to_bf16(x @ x.T)
        x = to_bf16(torch.addmm(x, to_bf16(torch.addmm(gram, gram, gram, beta=B, alpha=C)), x, beta=A))
    return (x.T if is_tall else x).bfloat16()


@contextmanager
def _masked(tensor: Tensor, applied: Tensor | None) -> Iterator[Tensor]:
    """Yield the tensor to be changed in place, or a copy that replaces it if `applied`."""
    if applied is None:
        yield tensor
        return
    changed = tensor.clone()
    yield changed
    masked_copy_(tensor, changed, applied)


def products_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def is_hidden(shard: Shard) -> bool:
    """Return whether Muon updates the parameter: a matrix of a block."""
    return shard.parameter.ndim == 2 and layer_of(shard.name) is not None


def _group_of(shards: Sequence[Shard]) -> ProcessGroup | None:
    """Return the group over which all matrices are sharded by rows, or None if they are whole.

    Raises:
        ValueError: A matrix is sharded otherwise.
    """
    groups: dict[ProcessGroup | None, str] = {}
    for shard in shards:
        parameter, sharded_axes = shard.parameter, []
        if isinstance(parameter, DTensor):
            sizes = parameter.device_mesh.shape
            # On top of column-wise tensor parallelism, `is_shard` is false for FSDP2's placement.
            sharded_axes = [
                (axis, p) for axis, p in enumerate(parameter.placements) if not p.is_replicate() and sizes[axis] > 1
            ]
        if is_slice(parameter) or len(sharded_axes) > 1 or any(placement != Cut(0) for _, placement in sharded_axes):
            raise ValueError(
                f"Muon needs matrices that are whole or sharded by rows only, and {shard.name!r} of "
                f"{tuple(parameter.shape)} is not; train without tensor parallelism and [sharding.levels], or with "
                "[optimizer] name = 'AdamW'"
            )
        groups[parameter.device_mesh.get_group(sharded_axes[0][0]) if sharded_axes else None] = shard.name
    if len(groups) > 1:
        raise ValueError(
            f"Muon needs matrices with the same sharding, but {' and '.join(map(repr, groups.values()))} differ"
        )
    (group,) = groups
    return group
