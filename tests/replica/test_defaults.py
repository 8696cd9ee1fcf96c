"""Training depends on neither PyTorch's default dtype nor its default device, which belong to the user's program."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import Pool
from tests.replica.own_loop import OPTIONS
from torchtitan_scape import AdamS, Muon, checkpoint_states, replicate
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.pytorch import create_state

STEPS = 5
OTHERS = ((torch.bfloat16, torch.device("meta")), (torch.float64, nullcontext()))
WITH_MUON = ({"method": "quantized_update"}, {"method": "sparta"})  # tensors of bases exist with Muon only
SECTIONS = [
    ({"method": name, **OPTIONS.get(name, {})}, AdamS if name == "scape" else torch.optim.AdamW) for name in METHODS
]
CASES: list[tuple[dict[str, Any], Any]] = [*SECTIONS, *((section, Muon) for section in WITH_MUON)]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40, bias=i > 0) for i in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).tanh()).square().mean()  # type: ignore[no-any-return]


def trained(section: dict[str, Any], kind: Any, dtype: torch.dtype, device: AbstractContextManager[Any]) -> Tensor:
    """Return the weights after a few steps of a loop that runs with these defaults."""
    torch.manual_seed(0)
    model, rank = Blocks(), dist.get_rank()
    batches = [torch.randn(8, 40, generator=torch.Generator().manual_seed(9 * rank + step)) for step in range(STEPS)]
    inner = kind(list(model.named_parameters()), lr=1e-2)
    create_state(inner)  # PyTorch's optimizers create counters on the default device
    torch.set_default_dtype(dtype)
    try:
        with device:
            optimizer = replicate(model, inner, section, dist.group.WORLD, max_norm=0.05, total_steps=STEPS)
            for x in batches:
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.stats()
            optimizer.check_consistency(STEPS)
            checkpoint_states(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.flush()
            with optimizer.shared_weights():
                return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    finally:
        torch.set_default_dtype(torch.float32)


def different() -> list[str]:
    found = []
    for section, kind in CASES:
        expected = trained(section, kind, torch.float32, nullcontext())
        for other in OTHERS:
            if not torch.equal(trained(section, kind, *other), expected):
                found.append(f"{section} {kind.__name__} {other}")
    return found


def test_methods_train_equally_with_other_default_dtypes_and_devices(pool2: Pool) -> None:
    assert pool2(different) == [[], []]
