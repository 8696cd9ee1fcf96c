"""Loading a checkpoint executes no code from it, and restores a trainer's state bitwise."""

import copy
import io
import json
import os
import pickle
import random
import re
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config import LRScheduler

from torchtitan_scape import AdamS, checkpoint_states, load_checkpoint, replicate
from torchtitan_scape.checkpoint.metadata import CheckedReader, SafePlanner, _Unpickler, load_into, read_record
from torchtitan_scape.checkpoint.storage import CheckedWriter, failure_text

pytestmark = pytest.mark.filterwarnings("ignore")


class Runs:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, storage_writer=CheckedWriter(path), checkpoint_id=path)
    return path


def load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    dcp.load(state, storage_reader=CheckedReader(path), planner=SafePlanner())
    return state


def trainer_state(seed: int, steps: int) -> dict[str, Any]:
    """Return a state like TorchTitan's: the model at the top level, the rest in dicts, with all supported types."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    schedulers = build_lr_schedulers([optimizer], LRScheduler(warmup_steps=2), 10)  # type: ignore[arg-type]
    for _ in range(steps):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        schedulers.step()
    return {
        **model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "lr_scheduler": schedulers.state_dict(),
        "train_state": {"step": torch.tensor(steps, dtype=torch.int32), "seen": torch.tensor(3.5, dtype=torch.float64)},
        "dataloader": {"dp_rank_0": bytes(range(256)) if steps else b"", "world_size": steps},
        "record": {"json": '{"a": 1}' if steps else ""},
        "values": {
            "none": None,
            "true": steps > 0,
            "tuple": (steps, "x", (1.5, -2)),
            "big": 10**30 * steps,
            "set": {steps},
            "dtype": torch.bfloat16 if steps else torch.int8,
            "halves": torch.randn(2, 3, 4).to(torch.bfloat16).transpose(0, 2) * steps,
            "float8": torch.randn(6).to(torch.float8_e4m3fn) if steps else torch.zeros(6, dtype=torch.float8_e4m3fn),
            "empty": torch.zeros(0, 3),
            "nested": [{"a": torch.ones(2) * steps}, {"b": steps}],
        },
    }


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: one for k, v in items for key, one in flat(v, f"{name}/{k}").items()} or {name: value}
    if isinstance(value, torch.Tensor):
        return {name: (value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist())}
    return {name: (type(value), value)}


def test_trainer_checkpoints_load_bitwise(tmp_path: Path) -> None:
    saved = trainer_state(seed=1, steps=3)
    path = save(saved, tmp_path / "step-3")
    loaded = trainer_state(seed=2, steps=0)
    for key in ("exp_avg", "exp_avg_sq", "step"):  # like TorchTitan's container, which creates the state before loading
        for name, state in saved["optimizer"]["state"].items():
            loaded["optimizer"]["state"].setdefault(name, {})[key] = torch.zeros_like(state[key])
    assert flat(load(loaded, path)) == flat(saved)


def test_metadata_with_code_is_refused(tmp_path: Path) -> None:
    path, made = save({"a": torch.ones(2)}, tmp_path / "c"), tmp_path / "made"
    metadata = copy.deepcopy(CheckedReader(path).read_metadata())
    metadata.planner_data["a"] = Runs(made)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata is refused: it names posix\.system, which no checkpoint needs"):
        CheckedReader(path).read_metadata()
    with pytest.raises(dcp.CheckpointException) as info:
        load({"a": torch.zeros(2)}, path)
    text = failure_text(info.value, path)  # torch 2.11 does not include the cause
    assert ("posix.system" in text or "metadata is None" in text) and not made.exists()
    dcp.load({"a": torch.zeros(2)}, checkpoint_id=path)  # a control: without protection the code runs
    assert made.exists()


def test_a_value_with_code_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = save({"a": torch.ones(2), "train_state": {"x": Runs(made)}}, tmp_path / "c")
    with pytest.raises(dcp.CheckpointException) as info:
        load({"a": torch.zeros(2), "train_state": {"x": 0}}, path)
    assert failure_text(info.value, path) == (
        f"checkpoint {path}: the checkpoint's value train_state.x is refused: it holds posix.system, which is no plain "
        "data; loading it could run code on rank 0"
    )
    assert not made.exists()
    dcp.load({"a": torch.zeros(2), "train_state": {"x": 0}}, checkpoint_id=path)
    assert made.exists()


class Named:
    """An object that is pickled as a call of a named function."""

    def __init__(self, module: str, name: str, *args: Any) -> None:
        self.named, self.args = (module, name), args

    def dumps(self) -> bytes:
        module, name = (b"\x8c" + bytes([len(text)]) + text.encode() for text in self.named)
        return b"\x80\x04" + module + name + b"\x93" + pickle.dumps(self.args, 4)[2:-1] + b"R."


@pytest.mark.parametrize(
    "module, name, args",
    [
        ("builtins", "eval", ("1",)),
        ("builtins", "__import__", ("os",)),
        ("torch.distributed.checkpoint.metadata", "os.system", ("true",)),
        ("torch.distributed.checkpoint.filesystem", "FileSystem", ()),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo.__init__.__globals__", ()),
        ("torch", "load", ("x",)),
        ("torch", "hub", ()),
        ("torch.serialization", "load", ("x",)),
        ("torch.serialization", "lo\nad", ()),
        ("pathlib", "Path.unlink", ()),
        ("collections", "namedtuple", ("a", "b")),
        ("builtins", "getattr", (Path, "unlink")),
        ("builtins", "getattr", (_MEM_FORMAT_ENCODING, "__init__")),
    ],
)
def test_globals_outside_the_allow_list_are_refused(
    module: str, name: str, args: tuple[Any, ...], tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(Named(module, name, *args).dumps())
    with pytest.raises(ValueError, match=r"\.metadata is (refused|damaged)") as info:
        CheckedReader(tmp_path).read_metadata()
    assert "\n" not in str(info.value)
    if name != "getattr":
        assert f"names {module}.{name},".replace("\n", " ") in str(info.value)


def test_enums_of_early_python_3_11_are_accepted() -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert isinstance(member, Enum)
    data = Named("builtins", "getattr", _MEM_FORMAT_ENCODING, member.name).dumps()
    assert _Unpickler(io.BytesIO(data)).load() is member


def test_metadata_with_foreign_paths_or_damage_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(2)}, tmp_path / "c")
    good = (path / ".metadata").read_bytes()
    for name in ("../c/__0_0.distcp", "/dev/zero", "..", ""):
        metadata = copy.deepcopy(CheckedReader(path).read_metadata())
        for info in metadata.storage_data.values():
            info.relative_path = name
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match="is not in its folder"):
            CheckedReader(path).read_metadata()
        (path / ".metadata").write_bytes(good)
    draw = random.Random(0)
    for length in [0, 1, *(draw.randrange(len(good)) for _ in range(40))]:
        (path / ".metadata").write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"\.metadata is damaged"):
            CheckedReader(path).read_metadata()
    for _ in range(300):  # a wrong byte gives another value, or a one-line error
        wrong = bytearray(good)
        wrong[draw.randrange(len(good))] = draw.randrange(256)
        (path / ".metadata").write_bytes(wrong)
        try:
            CheckedReader(path).read_metadata()
        except ValueError as error:
            assert str(path) in str(error)
    (path / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata is missing"):
        CheckedReader(path).read_metadata()


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the metadata of a checkpoint in place."""
    metadata = copy.deepcopy(CheckedReader(path).read_metadata())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def nested(depth: int) -> Any:
    """Return a tuple with 2**depth leaves; its hash would visit all of them."""
    value: Any = ()
    for _ in range(depth):
        value = (value, value)
    return value


def chunk(metadata: Any) -> Any:
    return metadata.state_dict_metadata["a"].chunks[0]


def storage(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "a")


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.state_dict_metadata.update({"x": nested(3)}), "refers to a tuple several times"),
        (lambda m: m.planner_data.update({(1, (2, 3)): {1}}), "pickle opcode 0x8f"),
        (lambda m: setattr(chunk(m), "offsets", torch.Size([-1])), "is damaged"),
        (lambda m: setattr(chunk(m), "sizes", torch.Size([7])), "is damaged"),
        (lambda m: setattr(chunk(m), "sizes", torch.Size([1, 1])), "is damaged"),
        (lambda m: m.state_dict_metadata["a"].chunks.clear(), "is damaged"),
        (lambda m: setattr(chunk(m), "sizes", torch.Size([1])), "is damaged"),
        (lambda m: setattr(m, "storage_meta", 5), "is damaged"),
        (lambda m: setattr(storage(m), "offset", -5), "is damaged"),
        (lambda m: setattr(storage(m), "length", "5"), "is damaged"),
        (lambda m: m.storage_data.update({5: storage(m)}), "is damaged"),
        (lambda m: object.__setattr__(next(iter(m.storage_data)), "fqn", 5), "is damaged"),
        (lambda m: m.state_dict_metadata.update({"x": 5}), "is damaged"),
    ],
)
def test_crafted_metadata_is_refused_in_one_line(change: Callable[[Any], Any], reason: str, tmp_path: Path) -> None:
    path = save({"a": torch.ones(2), "b": torch.ones(3, 2)}, tmp_path / "c")
    edited(path, change)
    with pytest.raises(ValueError, match=re.escape(f"{path}/.metadata ")) as info:
        CheckedReader(path).read_metadata()
    assert reason in str(info.value) and "\n" not in str(info.value)
    with pytest.raises(ValueError, match=r"^(?!.*bytes are free).*$"):
        load_into(str(path), {"a": torch.zeros(2)})


def test_keys_with_very_many_leaves_are_refused_at_once(tmp_path: Path) -> None:
    """The hash of the first has 2**30 leaves, and that of the second calls itself 2**24 times."""
    of_tuples = b"\x80\x04}))\x86" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(30)) + b"Ns."
    index: Any = "a"
    for _ in range(24):
        outer = MetadataIndex("a")
        object.__setattr__(outer, "fqn", index)
        object.__setattr__(outer, "offset", index)
        index = outer
    of_indices = pickle.dumps(index)[:-1].replace(b"\x80\x04", b"\x80\x04}", 1) + b"Ns."
    for data, reason in ((of_tuples, "refers to a tuple several times"), (of_indices, "is damaged")):
        (tmp_path / ".metadata").write_bytes(data)
        begin = time.monotonic()
        with pytest.raises(ValueError, match=reason):
            CheckedReader(tmp_path).read_metadata()
        assert time.monotonic() - begin < 3.0


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: setattr(storage(m), "offset", 10**9), "bytes, but .metadata places the end of 'a' at byte 1,00"),
        (lambda m: setattr(storage(m), "offset", 3), "has not what .metadata describes"),
        (lambda m: m.storage_data.pop(next(i for i in m.storage_data if i.fqn == "a")), "names no file of a"),
        (lambda m: setattr(storage(m), "relative_path", "other"), "/other is missing"),
    ],
)
def test_data_that_are_not_where_the_metadata_says_are_named(
    change: Callable[[Any], Any], reason: str, tmp_path: Path
) -> None:
    path = save({"a": torch.ones(2), "b": torch.ones(3, 2)}, tmp_path / "c")
    edited(path, change)
    with pytest.raises(ValueError, match=re.escape(f"checkpoint {path}: {path}/")) as info:
        load_into(str(path), {"a": torch.zeros(2)})
    assert reason in str(info.value) and "free" not in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{}", "has format 1, and this version reads format 3"),
        ('{"format": 3}', "it has no 'method'"),
        ("[]", "it is []"),
        ("5", "it is 5"),
        ("not JSON", "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ({"replicas": "x"}, "'replicas' is 'x'"),
        ({"states": []}, "'states' is []"),
        ({"states": {"mask": 5}}, "'mask' of 'states' is 5"),
        ({"counters": {"skipped": None}}, "'skipped' of 'counters' is None"),
        ({"code": [5]}, "'code' is [5]"),
        ({"method": "other"}, "there is no method 'other'"),
        ({"sharding": 5}, "AttributeError"),
        ({"format": 2}, "has format 2, and this version reads format 3; commit 937dd8d0 reads formats 1 and 2"),
        ({"format": 99}, "has format 99, and this version reads format 3; resume with the version that saved it"),
    ],
)
def test_a_damaged_record_of_the_run_is_named(content: Any, reason: str, tmp_path: Path) -> None:
    whole = {"format": 3, "method": "dense", "optimizer": "AdamW", "residual": "exact", "replicas": 2, "shard": 1}
    if isinstance(content, dict):
        content = json.dumps(whole | {"states": {}, "counters": {}} | content)
    path = save({"run_metadata": {"json": content}}, tmp_path / "c")
    with pytest.raises(ValueError, match=re.escape(str(path))) as info:
        read_record(str(path))
    assert reason in str(info.value) and "\n" not in str(info.value)


def test_a_key_that_the_record_lacks_is_named_when_it_is_read(tmp_path: Path) -> None:
    whole = {"format": 3, "method": "dense", "optimizer": "AdamW", "residual": "exact", "replicas": 2, "shard": 1}
    path = save({"run_metadata": {"json": json.dumps(whole | {"states": {}, "counters": {}})}}, tmp_path / "c")
    saved = read_record(str(path))
    assert saved["replicas"] == 2 and saved.get("betas") is None
    for table, key in ((saved, "model"), (saved["counters"], "skipped")):
        with pytest.raises(ValueError, match=f"run_metadata.json, is damaged: it has no '{key}'"):
            table[key]


@pytest.mark.parametrize("wrong", [5, {}, {"densities": [1.0], "applied_steps": 1.0}])
def test_a_damaged_value_of_the_method_is_one_line(wrong: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = replicate(model, AdamS(model.parameters()), "scape", total_steps=9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states: dict[str, Any] = dict(checkpoint_states(model, optimizer))
    states["run_metadata"] = {
        "json": json.dumps(json.loads(states["run_metadata"].state_dict()["json"]) | {"scape": wrong})
    }
    dcp.save(states, checkpoint_id=tmp_path / "c")
    with pytest.raises(ValueError, match=f"^{tmp_path}/c: the record of the run, run_metadata.json, is damaged: .*$"):
        load_checkpoint(str(tmp_path / "c"), model, optimizer)


def test_metadata_are_read_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = save({"a": torch.ones(2)}, tmp_path / "c"), []
    monkeypatch.setattr(
        "torchtitan_scape.checkpoint.metadata.check_opcodes", lambda content: reads.append(len(content))
    )
    first, second = (CheckedReader(path).read_metadata() for _ in range(2))
    assert len(reads) == 1 and first.storage_data == second.storage_data
    assert first.storage_meta.load_id != second.storage_meta.load_id  # type: ignore[union-attr]
    load({"a": torch.zeros(2)}, path)
    assert len(reads) == 1
    edited(path, lambda m: m.planner_data.update({"more": ("more",)}))
    assert "more" in CheckedReader(path).read_metadata().planner_data and len(reads) == 2
