"""Checkpoints of own training loops through `torch.distributed.checkpoint`: exact, or into another layout or method."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.pool import Pool
from tests.replica.own_loop import make_model, make_optimizer, shard, shared, train, weights
from torchtitan_scape.methods.registry import METHODS


class Progress:
    """A user's own state beside those of the checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def build(method: str, shards: int, **more: Any) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    model = make_model()
    if shards == 1:
        return model, make_optimizer(model, method, **more)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    shard(model, mesh["shard"])
    return model, make_optimizer(model, method, mesh["replicate"], **more)


def save(path: str, method: str, shards: int, steps: int, residual: str = "exact") -> dict[str, Any]:
    from torchtitan_scape import checkpoint_states

    model, optimizer = build(method, shards)
    train(model, optimizer, range(steps))
    progress = Progress()
    progress.step = steps
    dcp.save(checkpoint_states(model, optimizer, residual) | {"progress": progress}, checkpoint_id=path)
    at_save = {"weights": weights(model), "shared": shared(model, optimizer), "moment": moment(optimizer)}
    train(model, optimizer, range(steps, steps + 5))
    optimizer.finish_previous_step()
    return at_save | {"after": weights(model)}


def load(path: str, method: str, shards: int, steps: int) -> dict[str, Any]:
    from torchtitan_scape import load_checkpoint

    torch.manual_seed(1)
    model, optimizer = build(method, shards)
    train(model, optimizer, range(100, 102))  # all that is loaded has to be replaced
    text = load_checkpoint(path, model, optimizer)
    progress = Progress()
    dcp.load({"progress": progress}, checkpoint_id=path)
    assert progress.step == steps
    loaded = {"weights": weights(model), "shared": shared(model, optimizer), "moment": moment(optimizer), "text": text}
    train(model, optimizer, range(steps, steps + 5))
    optimizer.finish_previous_step()
    return loaded | {"after": weights(model)}


def moment(optimizer: Any) -> Tensor:
    """The first moments plus the mean of all that is pending in gradients, as the next steps will apply them."""
    parts = []
    for one in optimizer.shards():
        first, residual = optimizer.methods[0].moment_and_residual(one)
        whole = first.clone() if first is not None else torch.zeros(one.size)
        if residual is not None:
            mean = residual.clone()
            optimizer.collectives.sum_over_replicas(mean)
            beta1 = optimizer.param_groups[0]["betas"][0]
            units = 1.0 if "scape" in optimizer.settings["method"] else 1.0 - beta1
            whole += mean / optimizer.collectives.replicas * units / beta1
        parts.append(whole)
    squares = torch.cat(parts).double().square().sum()
    optimizer.collectives.sum_over_model(squares_32 := squares.float())
    return squares_32.sqrt()


def resume_every_method(folder: str, shards: int, methods: list[str]) -> list[str]:
    """Names of the methods whose resumed run differs in one bit on this rank."""
    different = []
    for method in methods:
        path = f"{folder}/{method}-{shards}"
        saved, loaded = save(path, method, shards, 8), load(path, method, shards, 8)
        equal = all(torch.equal(saved[key], loaded[key]) for key in ("weights", "shared", "after"))
        if not equal or "as it was saved" not in loaded["text"]:
            unequal = [key for key in ("weights", "shared", "after") if not torch.equal(saved[key], loaded[key])]
            different.append(f"{method}: {unequal} {loaded['text']}")
    return different


def test_every_method_resumes_bit_for_bit(pool2: Pool, tmp_path: Path) -> None:
    assert pool2(resume_every_method, str(tmp_path), 1, list(METHODS), timeout=300) == [[], []]


def test_shards_resume_bit_for_bit(pool4: Pool, tmp_path: Path) -> None:
    assert pool4(resume_every_method, str(tmp_path), 2, ["dense", "scape", "topk", "sparta"]) == [[]] * 4


@pytest.mark.parametrize(
    ("method", "into", "expected"),
    [
        ("topk", "topk", "every replica receives the mean of 2 replicas' pending gradients"),
        ("scape", "scape", "every replica receives the mean of 2 replicas' pending gradients"),
        ("scape", "dense", "added to the first moment"),
        ("sparta", "dense", "the mean of 2 replicas' weights and moments"),
        ("dense", "diloco", "all replicas start from the model and its moments"),
    ],
)
def test_another_layout_and_method(
    method: str, into: str, expected: str, pool2: Pool, pool4: Pool, tmp_path: Path
) -> None:
    """From two replicas to two of two shards each, and to four."""
    saved = pool2(save, str(tmp_path), method, 1, 8)
    for shards in (1, 2):
        loaded = pool4(load, str(tmp_path), into, shards, 8)
        text = loaded[0]["text"]
        if shards == 1:
            assert expected in text and "replicas 2 -> 4" in text
        else:
            assert "shard 1 -> 2" in text
        if method != "sparta":
            assert torch.equal(loaded[0]["weights"], saved[0]["weights"])
        if method in ("topk", "scape") and shards == 1:
            assert loaded[0]["moment"].item() == pytest.approx(saved[0]["moment"].item(), rel=1e-4)
        assert torch.isfinite(loaded[0]["after"]).all()


def one_process(folder: str) -> None:
    """Other optimizers of `torch.optim` than the registry's, and no process group of one's own."""
    from torchtitan_scape import checkpoint_states, load_checkpoint, replicate

    results = []
    for resumed in (False, True):
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = replicate(model, inner, "dense", dist.group.WORLD)
        if resumed:
            load_checkpoint(folder, model, optimizer)
        else:
            train(model, optimizer, range(4))
            dcp.save(checkpoint_states(model, optimizer), checkpoint_id=folder)
        train(model, optimizer, range(4, 8))
        results.append(weights(model))
    assert torch.equal(*results)


def test_other_optimizers_keep_their_state(pool2: Pool, tmp_path: Path) -> None:
    pool2(one_process, str(tmp_path))


def wrong(folder: str) -> list[str]:
    from torchtitan_scape import checkpoint_states, load_checkpoint, replicate

    model, optimizer = build("dense", 1)
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=folder)
    other = torch.nn.Linear(3, 3)
    other_optimizer = replicate(other, torch.optim.AdamW(other.parameters()), "dense", dist.group.WORLD)
    found = []
    dcp.save({"progress": Progress()}, checkpoint_id=folder + "/other")
    for call in (
        partial(load_checkpoint, folder, other, other_optimizer),
        partial(checkpoint_states, model, optimizer, "all"),
        partial(load_checkpoint, folder + "/none", model, optimizer),
        partial(load_checkpoint, folder + "/other", model, optimizer),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_mistakes_end_in_one_message(pool2: Pool, tmp_path: Path) -> None:
    another, residual, missing, foreign = pool2(wrong, str(tmp_path))[0]
    assert "holds the model '6,922 parameters in 6 tensors', this run has '12 parameters in 2 tensors'" in another
    assert residual == "residual is 'all'; it must be one of exact, mean, drop"
    assert missing.endswith(".metadata is missing")
    assert foreign.endswith("has no states of checkpoint_states(); save these, or load it with dcp.load")


def counters_of_scape(folder: str) -> tuple[int, int]:
    from torchtitan_scape import load_checkpoint

    save(folder, "dense", 1, 8)
    model, optimizer = build("scape", 1)
    load_checkpoint(folder, model, optimizer)
    return optimizer.attempted_steps, optimizer.methods[0].attempted_steps


def test_scape_continues_the_step_counter_of_another_method(pool2: Pool, tmp_path: Path) -> None:
    """Else its density warm-up, and the start of its master weights, would be repeated."""
    assert pool2(counters_of_scape, str(tmp_path)) == [(8, 8), (8, 8)]
