"""Checkpoints of own training loops through `torch.distributed.checkpoint`: exact, or into another layout or method."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.marks import covering, slow
from tests.pool import Pool
from tests.replica.own_loop import OPTIONS, loss_of, make_model, make_optimizer, shard, shared, train, weights
from torchtitan_scape.methods.registry import METHODS


class Progress:
    """A user's own state beside those of the checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def build(method: str, shards: int, tied: bool = False, **more: Any) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    if tied:
        model.insert(3, torch.nn.Linear(64, 64))
        model[3].weight = model[2].weight
    if shards == 1:
        return model, make_optimizer(model, method, **more)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"]) if tied else shard(model, mesh["shard"])
    return model, make_optimizer(model, method, mesh["replicate"], **more)


def save(path: str, method: str, shards: int, steps: int, residual: str = "exact", **more: Any) -> dict[str, Any]:
    from torchtitan_scape import checkpoint_states

    model, optimizer = build(method, shards, **more)
    train(model, optimizer, range(steps))
    progress = Progress()
    progress.step = steps
    dcp.save(checkpoint_states(model, optimizer, residual) | {"progress": progress}, checkpoint_id=path)
    at_save = {"weights": weights(model), "shared": shared(model, optimizer), "moment": moment(optimizer)}
    at_save["owner_error"] = owner_error(optimizer)
    train(model, optimizer, range(steps, steps + 5))
    optimizer.finish_previous_step()
    return at_save | {"after": weights(model)}


def owner_error(optimizer: Any) -> Tensor:
    """The flat errors of owners that this rank still has to subtract from the weights; zero for most methods."""
    errors = [s.tensors for s in optimizer.methods[0].states() if s.kind == "owner_error"]
    return torch.cat([t.reshape(-1) for tensors in errors for t in tensors.values()]) if errors else torch.zeros(())


def load(path: str, method: str, shards: int, steps: int, **more: Any) -> dict[str, Any]:
    from torchtitan_scape import load_checkpoint

    torch.manual_seed(1)
    model, optimizer = build(method, shards, **more)
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
    """Names of the methods whose resumed run differs in one bit on this rank, with two tied matrices."""
    different = []
    for method in methods:
        path = f"{folder}/{method}-{shards}"
        saved, loaded = save(path, method, shards, 8, tied=True), load(path, method, shards, 8, tied=True)
        equal = all(torch.equal(saved[key], loaded[key]) for key in ("weights", "shared", "after"))
        if not equal or "as it was saved" not in loaded["text"]:
            unequal = [key for key in ("weights", "shared", "after") if not torch.equal(saved[key], loaded[key])]
            different.append(f"{method}: {unequal} {loaded['text']}")
        names = {f"model.{i}.weight": torch.zeros(64, 64) for i in (2, 3)}
        dcp.load(names, checkpoint_id=path, no_dist=True)
        if not torch.equal(*names.values()):
            different.append(f"{method}: the names of a tied matrix have different values")
    return different


def test_every_method_resumes_bit_for_bit(pool2: Pool, tmp_path: Path) -> None:
    assert pool2(resume_every_method, str(tmp_path), 1, list(METHODS), timeout=300) == [[], []]


@pytest.mark.parametrize("methods", [["sparta"], slow(["scape", "dense", "topk"])])
def test_shards_resume_bit_for_bit(methods: list[str], pool4: Pool, tmp_path: Path) -> None:
    assert pool4(resume_every_method, str(tmp_path), 2, methods) == [[]] * 4


@pytest.mark.parametrize(
    ("method", "into", "shards", "expected"),
    [
        ("topk", "topk", 1, "every replica receives the mean of 2 replicas' pending gradients"),
        ("topk", "topk", 2, "shard 1 -> 2"),
        ("scape", "scape", 1, "the mean of the pending gradients"),
        slow("scape", "scape", 2, "shard 1 -> 2"),
        slow("scape", "dense", 1, "added to the first moment"),
        ("sparta", "dense", 1, "the mean of 2 replicas' weights and moments"),
        slow("sparta", "dense", 2, "shard 1 -> 2"),
        ("quantized_update", "quantized_update", 1, "every replica receives the mean of 2 replicas' pending gradients"),
        slow("quantized_update", "quantized_update", 2, "shard 1 -> 2"),
        slow("quantized_update", "dense", 1, "added to the first moment"),
        slow("quantized_update", "scape", 1, "the first moment was copied"),
        slow("dense", "diloco", 1, "all replicas start from the model and its moments"),
        ("onebit_adam", "onebit_adam", 1, "every replica receives the mean of 2 replicas' pending gradients"),
        slow("onebit_adam", "onebit_adam", 2, "shard 1 -> 2"),
        slow("onebit_adam", "dense", 1, "added to the first moment"),
    ],
)
def test_another_layout_and_method(
    method: str, into: str, shards: int, expected: str, pool2: Pool, pool3: Pool, pool4: Pool, tmp_path: Path
) -> None:
    """From two replicas to three, and to two of two shards each."""
    saved = pool2(save, str(tmp_path), method, 1, 8)
    loaded = (pool4 if shards == 2 else pool3)(load, str(tmp_path), into, shards, 8)
    text = loaded[0]["text"]
    assert expected in text and (shards == 2 or "replicas 2 -> 3" in text)
    if method not in ("sparta", "quantized_update") or into == "quantized_update":
        assert torch.equal(loaded[0]["weights"], saved[0]["weights"])
    if method in ("topk", "scape", "onebit_adam") and shards == 1:
        assert loaded[0]["moment"].item() == pytest.approx(saved[0]["moment"].item(), rel=1e-4)
    assert torch.isfinite(loaded[0]["after"]).all()


@pytest.mark.parametrize(("before", "after"), [("1bit_unbiased", "1bit"), slow("1bit", "1bit_unbiased")])
def test_sparta_continues_with_another_code(before: str, after: str, pool3: Pool, tmp_path: Path) -> None:
    """With three replicas the owner's error is a state with one code, and in the owner's weights with the other."""
    saved = pool3(save, str(tmp_path), "sparta", 1, 8, options={"code": before})
    loaded = pool3(load, str(tmp_path), "sparta", 1, 8, options={"code": after})
    for one, other in zip(saved, loaded, strict=True):
        assert f"code {before!r} -> {after!r}" in other["text"]
        assert bool(one["owner_error"].any()) == (before == "1bit_unbiased")
        torch.testing.assert_close(other["weights"], one["weights"] - one["owner_error"], rtol=1e-5, atol=1e-6)


def refused(path: str, method: str, into: str, **options: Any) -> str:
    from torchtitan_scape import load_checkpoint

    save(path, method, 1, 6)
    try:
        load_checkpoint(path, *build(into, 1, **options))
    except ValueError as error:
        return str(error)
    return ""


def test_a_frozen_variance_must_have_been_saved(pool2: Pool, tmp_path: Path) -> None:
    """SCAPE has none, and the warm-up of four steps is over; the local AdamW of DiLoCo's replicas has one."""
    for text in pool2(refused, str(tmp_path / "scape"), "scape", "onebit_adam"):
        assert "warmup_steps = 4 ends at step 4, and the checkpoint of step 6 has no variance" in text
        assert "after 0 updates it would be frozen; set warmup_steps to 106 or more" in text
    assert pool2(refused, str(tmp_path / "diloco"), "diloco", "onebit_adam") == ["", ""]


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
    assert "lacks 'model', which checkpoint_states() saves" in foreign


def counters_of_scape(folder: str) -> tuple[int, int]:
    from torchtitan_scape import load_checkpoint

    save(folder, "dense", 1, 8)
    model, optimizer = build("scape", 1)
    load_checkpoint(folder, model, optimizer)
    return optimizer.attempted_steps, optimizer.methods[0].attempted_steps


def test_scape_continues_the_step_counter_of_another_method(pool2: Pool, tmp_path: Path) -> None:
    """Else its density warm-up, and the start of its master weights, would be repeated."""
    assert pool2(counters_of_scape, str(tmp_path)) == [(8, 8), (8, 8)]


# --------------------------------------------------------------------------------------- layouts and meshes


def build_sharded(kind: str, method: str) -> tuple[Any, Any]:
    """One replica on all ranks with FSDP2 on a mesh without names, with tensor parallelism, or two simulated ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from torchtitan_scape import replicate
    from torchtitan_scape.topology.groups import ReplicaGroups
    from torchtitan_scape.topology.in_process import SimulatedReplicas

    model, replicas = make_model(), None
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        replicas = ReplicaGroups(None, dist.group.WORLD)
    else:
        fully_shard(model)
        if kind == "simulated":
            replicas = SimulatedReplicas(2, ReplicaGroups(None, dist.group.WORLD))
    make = partial(torch.optim.AdamW, lr=1e-2)
    optimizer = make if kind == "simulated" else make(model.parameters())
    return model, replicate(model, optimizer, {"method": method, **OPTIONS.get(method, {})}, replicas, max_norm=1.0)


def resumes(folder: str, kind: str, method: str) -> tuple[bool, str]:
    from torchtitan_scape import checkpoint_states, load_checkpoint

    def train_some(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            for replica in range(len(optimizer.replicas.endpoints)):
                loss_of(model, step, replica).backward()
                optimizer.stash_replica_gradients()
            optimizer.step()
            optimizer.zero_grad()

    path = f"{folder}/{kind}-{method}"
    model, optimizer = build_sharded(kind, method)
    train_some(model, optimizer, range(6))
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=path)
    train_some(model, optimizer, range(6, 10))
    torch.manual_seed(1)
    again, resumed = build_sharded(kind, method)
    text = load_checkpoint(path, again, resumed)
    train_some(again, resumed, range(6, 10))
    return torch.equal(shared(model, optimizer), shared(again, resumed)), text


@pytest.mark.parametrize("method, kind", covering(product(("topk", "sparta"), ("unnamed", "simulated"))))
def test_meshes_without_names_resume(method: str, kind: str, pool2: Pool, tmp_path: Path) -> None:
    for equal, text in pool2(resumes, str(tmp_path), kind, method):
        assert equal and "as it was saved" in text


def test_tensor_parallel_shards_resume(pool4: Pool, tmp_path: Path) -> None:
    for equal, text in pool4(resumes, str(tmp_path), "tensor", "topk"):
        assert equal and "as it was saved" in text


def split_in_state(module: Any) -> None:
    """Store the weight of a module in two halves, as TorchTitan 0.3.0 stores its fused projection of attention."""

    def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}upper"], state[f"{prefix}lower"] = state.pop(f"{prefix}weight").chunk(2)

    def merge(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}upper"), state.pop(f"{prefix}lower")])

    module.register_state_dict_post_hook(split)
    module.register_load_state_dict_pre_hook(merge)


def renamed(folder: str, method: str) -> tuple[bool, set[str]]:
    """Resume with hooks on the state of the model, which also has buffers, of which one is not part of the state."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    ends = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = make_model()
        split_in_state(model[2])
        model.register_buffer("kept", torch.full((2,), float(seed)))
        model.register_buffer("transient", torch.full((2,), float(seed)), persistent=False)
        optimizer = make_optimizer(model, method)
        if seed:
            load_checkpoint(folder, model, optimizer)
        else:
            train(model, optimizer, range(4))
            dcp.save(checkpoint_states(model, optimizer), checkpoint_id=folder)
        train(model, optimizer, range(4, 8))
        optimizer.finish_previous_step()
        ends.append((weights(model), model.kept, model.transient))
    (first, kept, _), (second, loaded, transient) = ends
    equal = torch.equal(first, second) and torch.equal(kept, loaded) and bool((transient == 1).all())
    return equal, {key for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata if "model." in key}


@pytest.mark.parametrize("method", ["dense", "sparta"])
def test_hooks_that_rename_parameters(method: str, pool2: Pool, tmp_path: Path) -> None:
    """`get_model_state_dict` raised AttributeError for TorchTitan 0.3.0's attention."""
    for equal, names in pool2(renamed, str(tmp_path), method):
        assert equal and {"model.2.weight", "model.kept"} < names
        assert not names & {"model.2.upper", "model.2.lower", "model.transient"}


# --------------------------------------------------------------------------------------- what a load replaces


def fresh_and_used(folder: str, methods: list[str]) -> list[str]:
    """Return the methods for which a load into an optimizer that has trained differs from one into a new optimizer."""
    from torchtitan_scape import load_checkpoint

    save(folder, "dense", 1, 4)
    different = []
    for method in methods:
        found = []
        for steps in (0, 5):
            model, optimizer = build(method, 1)
            train(model, optimizer, range(100, 100 + steps))
            load_checkpoint(folder, model, optimizer)
            train(model, optimizer, range(4, 9))
            found.append((shared(model, optimizer), optimizer.stats()))
        if not torch.equal(found[0][0], found[1][0]) or found[0][1] != found[1][1]:
            different.append(method)
    return different


def test_a_load_replaces_all_state(pool2: Pool, tmp_path: Path) -> None:
    """Also what the checkpoint lacks: outer momenta, masks, errors."""
    assert pool2(fresh_and_used, str(tmp_path), list(METHODS), timeout=300) == [[], []]


def bytes_after_loading(folder: str) -> tuple[float, float]:
    save(folder, "dense", 1, 8)
    from torchtitan_scape import load_checkpoint

    model, optimizer = build("dense", 1)
    load_checkpoint(folder, model, optimizer)
    train(model, optimizer, range(8, 10))
    stats = optimizer.stats()
    return stats["sent_bytes"], stats["dense_bytes"]


def test_bytes_are_counted_from_the_load(pool2: Pool, tmp_path: Path) -> None:
    for sent, dense in pool2(bytes_after_loading, str(tmp_path)):
        assert sent == pytest.approx(dense, rel=1e-2)


def options_with_a_budget(folder: str) -> tuple[Any, Any]:
    from torchtitan_scape import checkpoint_states

    model = make_model()
    optimizer = make_optimizer(model, "scape", options={"bytes": 0.3})
    train(model, optimizer, range(2))
    states = checkpoint_states(model, optimizer)
    dcp.save(states, checkpoint_id=folder)
    return optimizer.settings["density"], states["run_metadata"].values["density"]  # type: ignore[attr-defined]


def test_a_budget_of_bytes_is_recorded_as_what_it_chose(pool2: Pool, tmp_path: Path) -> None:
    for compared, recorded in pool2(options_with_a_budget, str(tmp_path)):
        assert compared == recorded != 0.1


def save_with_some_ranks() -> str:
    """Train with two of three ranks as replicas, the third alone, and return the error of a save."""
    from torchtitan_scape import checkpoint_states

    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = make_model()
    optimizer = make_optimizer(model, "sparta", groups[dist.get_rank() // 2])
    train(model, optimizer, range(2))
    with pytest.raises(ValueError) as error:
        checkpoint_states(model, optimizer)
    return str(error.value)


def test_replicas_on_some_ranks_are_refused(pool3: Pool) -> None:
    """The layout is gathered from all ranks: two models failed in the mesh, and one alone waited for the others."""
    errors = pool3(save_with_some_ranks)
    assert ["are 2 of the job's 3" in each for each in errors] == [True, True, False] and "are 1 of" in errors[2]
