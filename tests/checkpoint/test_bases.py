"""The bases of Muon with quantized updates in checkpoints: what other layouts lose, and what earlier versions lack."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.checkpoint.sizes import bytes_on_disk
from tests.pool import Pool
from torchtitan_scape.checkpoint.state import sizes
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.replica.replicate import replicate


def build(method: str) -> tuple[Any, Any]:
    from torchtitan_scape import Muon

    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)])})
    kind: Any = AdamS if method == "scape" else Muon
    return model, replicate(model, kind(list(model.named_parameters()), lr=0.01), method, dist.group.WORLD)


def train(model: Any, optimizer: Any, *steps: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model["layers"][0](torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def load_update_in_bases(path: str, into: str) -> str:
    """Save a run of Muon with quantized updates; return what a load into another method says."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    run = build("quantized_update")
    train(*run, 0, 10)
    dcp.save(checkpoint_states(*run), checkpoint_id=path)
    other = build(into)
    train(*other, 20)
    return load_checkpoint(path, *other)


def resume_from_before(path: str) -> tuple[str, Tensor, Tensor]:
    """Resume from a checkpoint without the start of the bases, before step 15 of 22.

    Returns:
        What the load says, and the weights at the end, with and without the interruption.
    """
    from torchtitan_scape import checkpoint_states, load_checkpoint
    from torchtitan_scape.methods.quantized_update.bases import SharedBases

    run = build("quantized_update")
    train(*run, *range(14))
    with patch.object(SharedBases, "states", lambda bases, name: [bases.whitening.state()]):
        dcp.save(checkpoint_states(*run), checkpoint_id=path)
    train(*run, *range(14, 22))
    resumed = build("quantized_update")
    message = load_checkpoint(path, *resumed)
    train(*resumed, *range(14, 22))
    return message, resumed[0]["layers"][0].weight.detach(), run[0]["layers"][0].weight.detach()


@pytest.mark.parametrize("into", ["dense", "scape"])
def test_a_load_names_pending_gradients_that_are_lost(into: str, pool2: Pool, tmp_path: Path) -> None:
    for text in pool2(load_update_in_bases, str(tmp_path), into):
        assert "pending gradients are lost: they are stored in the bases of the other layout or options" in text


def test_a_checkpoint_of_before_resumes_bit_for_bit(pool2: Pool, tmp_path: Path) -> None:
    """In step 21 the bases change, 20 steps after the first of the run, and no exchange is complete."""
    for message, resumed, uninterrupted in pool2(resume_from_before, str(tmp_path)):
        assert "as it was saved" in message
        assert torch.equal(resumed, uninterrupted)


def sizes_with_shards(path: str) -> tuple[dict[str, int], dict[str, int]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from torchtitan_scape import Muon, checkpoint_states

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 33)])})
    fully_shard(model["layers"][0], mesh=mesh["shard"])
    optimizer = replicate(model, Muon(list(model.named_parameters())), "quantized_update", mesh["replicate"])
    model["layers"][0](torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=path)
    return sizes(optimizer, "exact"), bytes_on_disk(path)


def test_the_size_of_bases_is_that_of_all_shards(pool4: Pool, tmp_path: Path) -> None:
    """Of 33 rows one shard has 17 and the other 16."""
    for expected, on_disk in pool4(sizes_with_shards, str(tmp_path)):
        assert expected == on_disk and on_disk["basis"] > 0
