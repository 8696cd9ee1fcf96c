"""Muon for the matrices of a model's blocks, AdamW for the rest, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), kellerjordan.github.io/posts/muon; the
step's length is that of Liu et al., "Muon is Scalable for LLM Training" (2025), arXiv:2502.16982.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_scape.sync.options import check_hyperparameters
from torchtitan_scape.sync.shards import Shard, collect_shards, layer_of, local


class Muon(Optimizer):
    """PyTorch's Muon and AdamW, on gradients that are already synchronised; decoupled weight decay.

    Muon steps along momentum whose singular values are made equal, by five Newton-Schulz iterations in BF16. It is for
    the matrices of the blocks (two dimensions, a layer's number in the name): embedding, output, norms and biases
    are AdamW's, as Muon's authors and PyTorch's documentation advise. One learning rate serves both:
    `adjust_lr_fn="match_rms_adamw"` makes a step of Muon as long as one of AdamW usually is, 0.2 lr in the mean square.

    Args:
        params: (name, parameter), all in one group; plain tensors or DTensors that are not cut.
        betas: the first is Muon's momentum, too, which is Nesterov's.
        eps: AdamW's. Muon's own, which keeps a gradient of zeros from 0 / 0, is PyTorch's.
        fused, foreach: AdamW's implementation.

    State of every parameter is "step" and "exp_avg", which is Muon's momentum, FP32; AdamW has "exp_avg_sq" besides.
    A parameter without a gradient is left as it is.

    Raises ValueError for a model without such matrices, and for matrices that are cut into shards.
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
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        assert len(self.param_groups) == 1
        shards = collect_shards(self.param_groups)
        self._hidden = [shard for shard in shards if is_hidden(shard)]
        rest = [shard.parameter for shard in shards if not is_hidden(shard)]
        if not self._hidden:
            raise ValueError(
                f"Muon is for matrices of numbered layers, and none of {shards[0].name!r} to {shards[-1].name!r} is "
                "one; set [optimizer] name = 'AdamW'"
            )
        for shard in self._hidden:
            _check_whole(shard)
        self._muon = torch.optim.Muon([_plain(shard) for shard in self._hidden], adjust_lr_fn="match_rms_adamw")
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
        rates = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        momentum: defaultdict[Tensor, Any] = defaultdict(dict)
        for shard in (shard for shard in self._hidden if shard.parameter.grad is not None):
            own, state = _plain(shard), self.state[shard.parameter]
            own.grad = local(shard.parameter.grad)
            momentum[own] = {"momentum_buffer": local(state["exp_avg"])}
            state["step"] += 1
        # The tensors of this step: of DTensors they are made anew.
        self._muon.state = momentum
        self._muon.param_groups[0].update(rates, params=list(momentum), momentum=group["betas"][0])
        self._muon.step()
        for own in momentum:
            own.grad = None  # of the parameter's memory alone: it would stay through the next backward pass
        if self._adamw is not None:
            self._adamw.state = self.state
            self._adamw.param_groups[0].update(rates, betas=group["betas"], eps=group["eps"])
            self._adamw.step()
        return loss


def is_hidden(shard: Shard) -> bool:
    """Whether Muon updates it: a matrix of a block."""
    return shard.parameter.ndim == 2 and layer_of(shard.name) is not None


def _plain(shard: Shard) -> Tensor:
    """The numbers of a parameter that is not cut, without gradient."""
    return local(shard.parameter).detach()


def _check_whole(shard: Shard) -> None:
    parameter = shard.parameter
    if isinstance(parameter, DTensor) and any(
        placement.is_shard() and parameter.device_mesh.size(axis) > 1
        for axis, placement in enumerate(parameter.placements)
    ):
        raise ValueError(
            f"Muon needs whole matrices, and {shard.name!r} of {tuple(parameter.shape)} is cut into shards; train "
            "without shards and tensor parallelism, or with AdamW"
        )
