"""Pending gradients in the bases of one layout and method, which no other can read: the load names the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.pool import Pool
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.replica.replicate import replicate


def load_update_in_bases(path: str, into: str) -> str:
    """Save a run of Muon with quantized updates; return what a load into another method says."""
    from torchtitan_scape import Muon, checkpoint_states, load_checkpoint

    def train(method: str, *steps: int) -> tuple[Any, Any]:
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)])})
        kind: Any = AdamS if method == "scape" else Muon
        optimizer = replicate(model, kind(list(model.named_parameters()), lr=0.01), method, dist.group.WORLD)
        for step in steps:
            inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step + dist.get_rank()))
            model["layers"][0](inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    dcp.save(checkpoint_states(*train("quantized_update", 0, 10)), checkpoint_id=path)
    return load_checkpoint(path, *train(into, 20))


@pytest.mark.parametrize("into", ["dense", "scape"])
def test_a_load_names_pending_gradients_that_are_lost(into: str, pool2: Pool, tmp_path: Path) -> None:
    for text in pool2(load_update_in_bases, str(tmp_path), into):
        assert "pending gradients are lost: they are stored in the bases of the other layout or options" in text
