"""The bases of Muon with quantized updates in checkpoints: what other layouts lose, and what earlier versions lack."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import training
from tests.checkpoint.runs import ALONE
from tests.pool import Pool
from tests.training import METHODS
from torchtitan_scape.core.parameters import local
from torchtitan_scape.methods.imported import for_moment
from torchtitan_scape.methods.quantized_update.bases import MatrixBasis
from torchtitan_scape.methods.quantized_update.options import BASIS_LAYOUT
from torchtitan_scape.optimizers.elementwise import AdamS
from torchtitan_scape.replica.replicate import replicate


def build(method: str, shards: int = 1) -> tuple[Any, Any]:
    """Two matrices of 33 rows, of which one of two shards has 17 and the other 16."""
    from torchtitan_scape import Muon

    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 33), nn.Linear(33, 33)])})
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    if shards > 1:
        for layer in model["layers"]:
            fully_shard(layer, mesh=mesh["shard"])
    kind: Any = AdamS if method == "scape" else Muon
    return model, replicate(model, kind(list(model.named_parameters()), lr=0.01), method, mesh["replicate"])


def train(model: Any, optimizer: Any, *steps: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        nn.Sequential(*model["layers"])(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def bases_of_whole_sides() -> Iterator[None]:
    """Save as before bases had blocks: matrices (d, d) in FP32, and nothing about blocks in the record."""

    def tensors(basis: MatrixBasis) -> dict[str, Tensor]:
        found = present(basis)
        return {kind: torch.block_diag(*blocks.float()) for kind, blocks in found.items()}

    present = MatrixBasis.tensors
    with patch.object(MatrixBasis, "tensors", tensors), patch.dict(BASIS_LAYOUT, clear=True):
        yield


def load_update_in_bases(
    path: str, into: str, shards: int = 1, before_blocks: bool = False
) -> tuple[str, list[Tensor], list[Tensor]]:
    """Save a run of Muon with quantized updates, and load it into another method, or one replica of two shards.

    Returns:
        What the load says; the first moments after it; and those of the run plus its pending gradients.
    """
    from torchtitan_scape import checkpoint_states, load_checkpoint

    run = build("quantized_update")
    train(*run, 0, 10)
    wanted = []
    for shard in run[1].shards():
        moment, pending = run[1].methods[0].moment_and_residual(shard)
        dist.all_reduce(pending)
        wanted.append(moment + for_moment(pending / 2, run[1].param_groups[0]["betas"][0]))
    with bases_of_whole_sides() if before_blocks else nullcontext():
        dcp.save(checkpoint_states(*run), checkpoint_id=path)
    other = build(into, shards)
    train(*other, 20)
    text = load_checkpoint(path, *other)
    return text, [other[1].methods[0].moment_and_residual(shard)[0] for shard in other[1].shards()], wanted


def resume(path: str, shards: int) -> tuple[str, list[Tensor], list[Tensor]]:
    """Resume before step 15 of 22.

    Returns:
        What the load says, and the weights at the end, with and without the interruption.
    """
    from torchtitan_scape import checkpoint_states, load_checkpoint

    run = build("quantized_update", shards)
    train(*run, *range(14))
    dcp.save(checkpoint_states(*run), checkpoint_id=path)
    train(*run, *range(14, 22))
    resumed = build("quantized_update", shards)
    message = load_checkpoint(path, *resumed)
    train(*resumed, *range(14, 22))
    found, wanted = ([local(one.detach()) for one in model.parameters()] for model, _ in (resumed, run))
    return message, found, wanted


@pytest.mark.parametrize("into", ["dense", "scape"])
def test_pending_gradients_in_bases_are_decoded(into: str, pool2: Pool, tmp_path: Path) -> None:
    for text, found, wanted in pool2(load_update_in_bases, str(tmp_path), into):
        assert "lost" not in text
        if into == "dense":  # SCAPE's first moment is FP32 as well, but of AdamS
            assert "was added to the first moment" in text
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("into", ["dense", "quantized_update"])
def test_pending_gradients_in_bases_of_whole_sides_are_decoded(into: str, pool2: Pool, tmp_path: Path) -> None:
    for text, found, wanted in pool2(load_update_in_bases, str(tmp_path), into, 1, True):
        assert "lost" not in text and "was added to the first moment" in text
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_load_names_pending_gradients_that_are_lost(pool2: Pool, tmp_path: Path) -> None:
    for text, _, _ in pool2(load_update_in_bases, str(tmp_path), "dense", 2):
        assert "pending gradients are lost: they are stored in the bases of other shards" in text


@pytest.mark.parametrize("shards", [1, 2])
def test_bases_resume_bit_for_bit(shards: int, pool4: Pool, tmp_path: Path) -> None:
    """In step 21 the bases change, 20 steps after the first of the run, and no exchange is complete."""
    for message, resumed, uninterrupted in pool4(resume, str(tmp_path), shards):
        assert "as it was saved" in message
        assert all(map(torch.equal, resumed, uninterrupted))


def test_simulated_replicas_resume_bit_for_bit(pool1: Pool, tmp_path: Path) -> None:
    """Each matrix has one simulated owner, whose moments no other replica has; bases change after steps 3 and 6."""
    arguments = [*METHODS["quantized-update"], *ALONE, "--topology.simulate_replicas=3", "--training.steps=8"]
    arguments += ["--checkpoint.enable", "--checkpoint.interval=5", "--checkpoint.no-last-save-model-only"]
    (whole,) = pool1(training.train, str(tmp_path / "whole"), arguments)
    training.copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 5)
    (resumed,) = pool1(training.train, str(tmp_path / "resumed"), arguments)
    assert resumed["losses"] == whole["losses"][5:] and torch.equal(resumed["parameters"], whole["parameters"])
