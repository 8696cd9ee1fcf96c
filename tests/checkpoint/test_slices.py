"""Slices of tensors in checkpoints: their boxes, copies for asynchronous saves, and parts of several ranks."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.pool import Pool
from torchtitan_scape.checkpoint.metadata import load_into
from torchtitan_scape.checkpoint.state import FlatSlices, GlobalLayout, boxes_of, flat_boxes
from torchtitan_scape.core.parameters import SliceParameter, local


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_of_a_flat_slice(shape: list[int], data: Any) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = [
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].reshape(-1)
        for offsets, sizes in boxes_of(shape, start, stop)
    ]
    assert torch.cat([whole.view(-1)[:0], *found]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


def halves(whole: Tensor, cut: int = 22) -> FlatSlices:
    """Return the whole tensor as slices, whose values are views of a larger buffer."""
    flat, shape = torch.cat([torch.zeros(3), whole.view(-1)])[3:], whole.shape
    return FlatSlices(shape, whole.dtype, flat_boxes(shape, 0, flat[:cut]) | flat_boxes(shape, cut, flat[cut:]))


def test_slices_in_a_checkpoint(tmp_path: Path) -> None:
    """A tensor written as slices can be read as any other tensor: whole, or in other slices."""
    whole = torch.arange(60.0).view(4, 5, 3)
    dcp.save({"a": halves(whole)}, checkpoint_id=tmp_path)
    for load in (lambda state: dcp.load(state, checkpoint_id=tmp_path), lambda state: load_into(str(tmp_path), state)):
        plain, first, last = torch.zeros(4, 5, 3), torch.zeros(1, 1, 30), torch.zeros(10)
        load({"a": plain})
        assert torch.equal(plain, whole)
        load({"a": FlatSlices(whole.shape, whole.dtype, flat_boxes(whole.shape, 7, first))})
        load({"a": FlatSlices(whole.shape, whole.dtype, flat_boxes(whole.shape, 50, last))})
        assert first.view(-1).tolist() == list(range(7, 37)) and last.tolist() == list(range(50, 60))
    with pytest.raises(ValueError, match=r"another model or method: .*ize mismatch"):
        load_into(str(tmp_path), {"a": halves(whole.view(5, 4, 3))})


STAGERS: dict[str, Any] = {
    "default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "blocking": lambda: BlockingAsyncStager(),
    "cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
}


@pytest.mark.parametrize("name", STAGERS)
def test_copies_for_asynchronous_saves(name: str) -> None:
    """A stager's copy has the values of the time of the copy. A second save may use the same stager."""
    whole, empty = torch.arange(60.0).view(4, 5, 3), FlatSlices((4, 5), torch.float32, {})
    stager: AsyncStager = STAGERS[name]()
    for factor in (1, 2):
        slices = halves(factor * whole)
        staged: Any = stager.stage({"a": {"b": slices}, "empty": empty})
        for values in slices.boxes.values():
            values.fill_(-1)
        copied = staged["a"]["b"]
        assert type(copied) is FlatSlices and copied.shape == whole.shape and copied.dtype == whole.dtype
        expected = halves(factor * whole).boxes
        assert copied.boxes.keys() == expected.keys()
        assert all(torch.equal(copied.boxes[at], values) for at, values in expected.items())
        assert type(staged["empty"]) is FlatSlices and staged["empty"].boxes == {}
    stager.close()


def test_pickled_and_converted_slices() -> None:
    """Saves by another process pickle the staged tensors, and exports convert them."""
    whole = torch.arange(60.0).view(4, 5, 3)
    pickled, converted = pickle.loads(pickle.dumps(halves(whole))), halves(whole).to(torch.bfloat16)
    for found, dtype in ((pickled, torch.float32), (converted, torch.bfloat16)):
        assert type(found) is FlatSlices and found.shape == whole.shape and found.dtype == dtype
        expected = halves(whole).boxes
        assert found.boxes.keys() == expected.keys()
        for at, values in expected.items():
            assert found.boxes[at].dtype == dtype and torch.equal(found.boxes[at], values.to(dtype))


def test_other_operations_are_refused() -> None:
    slices = halves(torch.zeros(4, 5, 3))
    for use in (lambda: slices + 1, lambda: slices.view(-1), lambda: slices.copy_(torch.zeros(4, 5, 3))):
        with pytest.raises(NotImplementedError, match="FlatSlices, which are for checkpoints only; use their boxes"):
            use()
    with pytest.raises(NotImplementedError, match="copy_"):
        slices.copy_(halves(torch.zeros(4, 5, 3), 23))


# ------------------------------------------------------------------------------------------------- parts


def test_parts_of_tensors_in_one_process(tmp_path: Path) -> None:
    """Parts of a plain tensor and of a slice parameter; all entries of a tensor remain a plain tensor."""
    layout, whole = GlobalLayout(None, 1), torch.arange(60.0).view(4, 5, 3)
    plain, buffer = whole.clone(), whole.view(-1)[20:50].clone()
    sliced = SliceParameter(buffer.view(1, 1, 30), whole.shape, 20)
    parts = {
        "plain": layout.part(plain, plain.view(-1)[:33], 0).boxes | layout.part(plain, plain.view(-1)[33:], 33).boxes,
        "sliced": layout.part(plain, plain.view(-1)[:20], 0).boxes
        | layout.part(sliced, buffer[:11], 0).boxes
        | layout.part(sliced, buffer[11:], 11).boxes
        | layout.part(plain, plain.view(-1)[50:], 50).boxes,
        "whole_slice": layout.part(plain, plain.view(-1)[:20], 0).boxes
        | layout.part(sliced, buffer, 0).boxes
        | layout.part(plain, plain.view(-1)[50:], 50).boxes,
    }
    state: dict[str, Any] = {key: FlatSlices(whole.shape, whole.dtype, boxes) for key, boxes in parts.items()}
    for key, values in (("all", plain.view(-1)), ("scalar", torch.ones(1))):
        parameter = torch.zeros(()) if key == "scalar" else plain
        state[key] = layout.part(parameter, values, 0)
        assert type(state[key]) is Tensor and state[key].shape == parameter.shape
    dcp.save(state, checkpoint_id=tmp_path)
    found = {key: torch.zeros(value.shape) for key, value in state.items()}
    load_into(str(tmp_path), dict(found))
    assert found.pop("scalar") == 1.0
    for key, values in found.items():
        assert torch.equal(values, whole), key


SHAPES = {"even": (4, 5, 3), "uneven": (7, 5), "vector": (5,), "one_row": (1, 6), "columns": (3, 8), "copies": (3, 7)}


def whole_of(key: str) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(SHAPES[key]).numel()).view(SHAPES[key])


def distributed(mesh: Any) -> dict[str, DTensor]:
    placements: dict[str, Any] = {"columns": Shard(1), "copies": Replicate()}
    return {key: distribute_tensor(whole_of(key), mesh, [placements.get(key, Shard(0))]) for key in SHAPES}


def own_parts(empty: bool = False) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Return this rank's parts in a layout of 2 replicas of 2 shards, and their values and expected values."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "shard"))
    layout = GlobalLayout(mesh, 1)
    state, found = {}, []
    for key, parameter in distributed(mesh["shard"]).items():
        flat = local(parameter).reshape(-1)
        cut = 2 * flat.numel() // 5  # inside a row
        start, stop = (0, cut) if layout.replica == 0 else (cut, flat.numel())
        buffer = torch.cat([torch.full((2,), -2.0), flat[start:stop] * (0 if empty else 1)])
        found.append((buffer[2:], flat[start:stop]))
        state[key] = layout.part(parameter, buffer[2:], start)
    return state, found


def save_parts(folder: str, asynchronous: bool) -> int:
    """Save, and return the number of boxes of all tensors."""
    state, found = own_parts()
    if asynchronous:
        future: Any = dcp.async_save({"state": state}, checkpoint_id=folder)
        for values, _ in found:
            values.fill_(-1)
        future.result()
    else:
        dcp.save({"state": state}, checkpoint_id=folder)
    return sum(len(value.boxes) if isinstance(value, FlatSlices) else 1 for value in state.values())


def read_parts(folder: str) -> bool:
    state, found = own_parts(empty=True)
    load_into(folder, {"state": state})
    return all(torch.equal(values, expected) for values, expected in found)


def read_shards(folder: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    expected = distributed(init_device_mesh("cpu", (4,)))
    state = {key: torch.zeros_like(value) for key, value in expected.items()}
    load_into(folder, {"state": state})
    return all(torch.equal(local(state[key]), local(value)) for key, value in expected.items())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_save_parts_under_one_name(asynchronous: bool, pool4: Pool, tmp_path: Path) -> None:
    """Two replicas of two shards save disjoint parts of each shard; every other layout reads the whole tensors."""
    boxes = sum(pool4(save_parts, str(tmp_path), asynchronous))
    assert pool4(read_parts, str(tmp_path)) == [True] * 4
    assert pool4(read_shards, str(tmp_path)) == [True] * 4
    found = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    load_into(str(tmp_path), {"state": dict(found)})
    for key, values in found.items():
        assert torch.equal(values, whole_of(key)), key
    # The replicated tensor is written once: its boxes are those of one shard.
    metadata: Any = dcp.FileSystemReader(tmp_path).read_metadata()
    chunks = {key: metadata.state_dict_metadata[f"state.{key}"].chunks for key in SHAPES}
    assert sum(map(len, chunks.values())) < boxes
    assert sum(chunk.sizes.numel() for chunk in chunks["copies"]) == 21


def strided_parts(folder: str) -> str:
    """Save a model of FSDP2 over tensor parallel shards in two parts per rank; return the placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "shard", "tensor"))
    layout, model = GlobalLayout(mesh, 1), torch.nn.Sequential(torch.nn.Linear(5, 14), torch.nn.Linear(14, 7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(1.0, 1 + parameter.numel()).view(parameter.shape))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    state = {}
    for name, parameter in model.named_parameters():
        flat = local(parameter).detach().reshape(-1)
        cut = 3 * flat.numel() // 7
        boxes: dict[tuple[int, ...], Tensor] = {}
        for start, stop in ((0, cut), (cut, flat.numel())):
            part = layout.part(parameter, flat[start:stop], start)
            boxes |= part.boxes if isinstance(part, FlatSlices) else {}
        state[name] = FlatSlices(parameter.shape, parameter.dtype, boxes) if cut else layout.whole(parameter, flat)
    dcp.save(state, checkpoint_id=folder)
    return str([parameter.placements for parameter in model.parameters()])  # type: ignore[attr-defined]


def test_parts_of_strided_shards(pool4: Pool, tmp_path: Path) -> None:
    placements = pool4(strided_parts, str(tmp_path))[0]
    assert "StridedShard" in placements and "Shard(dim=1)" in placements
    for name, shape in (("0.weight", (14, 5)), ("0.bias", (14,)), ("1.weight", (7, 14)), ("1.bias", (7,))):
        found = torch.zeros(shape)
        load_into(str(tmp_path), {name: found})
        assert torch.equal(found, torch.arange(1.0, 1 + found.numel()).view(shape)), name
