"""Reading the whole model of a checkpoint in one process, without a process group."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_scape.checkpoint.metadata import RUN_METADATA, CheckedReader, load_into, read_record
from torchtitan_scape.checkpoint.state import RANDOM
from torchtitan_scape.checkpoint.storage import find_damage, is_finished, steps_in
from torchtitan_scape.titan.components import DATALOADER, LR_SCHEDULER, OPTIMIZER

_PROGRESS = "train_state"
# First parts of the names of entries that are not parameters.
_OTHERS = {OPTIMIZER, DATALOADER, LR_SCHEDULER, RUN_METADATA, RANDOM, _PROGRESS}
_MASTERS = f"{OPTIMIZER}.master."


@dataclass(frozen=True)
class CheckpointInfo:
    """Information about the run in a checkpoint; None if the checkpoint does not contain it.

    Attributes:
        step: Number of the step.
        tokens: Tokens of all ranks.
        record: See `metadata.py`.
    """

    step: int | None
    tokens: int | None
    record: dict[str, Any] | None


def finished_steps(folder: Path) -> list[int]:
    """Return the steps of the completed checkpoints in a folder, ascending."""
    return [step for step in steps_in(folder) if is_finished(folder / f"step-{step}")]


def open_checkpoint(path: Path) -> CheckpointInfo:
    """Verify every file of a checkpoint.

    Raises:
        ValueError: The checkpoint is missing, incomplete or damaged.
    """
    if not path.is_dir():
        there = [f"step-{step}" for step in finished_steps(path.parent)]
        raise ValueError(
            f"there is no checkpoint {path}"
            + (f"; finished in {path.parent} are {', '.join(there)}" if there else "; none is finished there")
        )
    if (damage := find_damage(path)) is not None:
        raise ValueError(f"the checkpoint cannot be used: {damage}")
    names = _stored(path)
    step, tokens, record = None, None, None
    if match := re.fullmatch(r"step-(\d+)", path.name):
        step = int(match[1])
    if f"{_PROGRESS}.step" in names and RUN_METADATA + ".json" in names:
        progress: dict[str, Any] = {_PROGRESS: {"step": 0, "ntokens_seen": 0}}
        load_into(str(path), progress)
        record = read_record(str(path))
        step = progress[_PROGRESS]["step"]
        tokens = progress[_PROGRESS]["ntokens_seen"] * record["replicate"] * record["shard"]
    return CheckpointInfo(step, tokens, record)


def read_model(path: Path, shapes: Mapping[str, torch.Size], masters: bool) -> dict[str, Tensor]:
    """Return every parameter by name, FP32.

    Args:
        path: Folder of the checkpoint.
        shapes: Shapes of the parameters by name.
        masters: Read the FP32 masters of BF16 weights in place of the weights.

    Raises:
        ValueError: The checkpoint has other parameters, or no masters.
    """
    stored = _stored(path)
    sizes = {name: tuple(entry.size) for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    check_shapes({name: size for name, size in sizes.items() if name.split(".")[0] not in _OTHERS}, shapes, str(path))
    if masters and not all(_MASTERS + name in sizes for name in shapes):
        raise ValueError(
            f"--weights master: {path} has no masters beside its weights; give --weights model (a checkpoint of the "
            "model alone, and one whose weights are FP32, has nothing else)"
        )
    values = {name: torch.empty(shape, dtype=torch.float32, device="cpu") for name, shape in shapes.items()}
    load_into(str(path), {_MASTERS + name if masters else name: value for name, value in values.items()})
    return values


def check_shapes(present: Mapping[str, tuple[int, ...]], expected: Mapping[str, torch.Size], where: str) -> None:
    """Raise ValueError with the first parameter that is missing, has another shape, or is not expected."""
    for name, shape in expected.items():
        if name not in present:
            raise ValueError(f"{where} has no {name}: it is of another model than the recipe's")
        if tuple(shape) != tuple(present[name]):
            raise ValueError(
                f"{where} has {name} of shape {tuple(present[name])}, the model of the recipe {tuple(shape)}: give the "
                "recipe, with the flavor, that it was trained with"
            )
    if more := present.keys() - expected.keys():
        raise ValueError(f"{where} has {min(more)}, which the model of the recipe does not have")


def _stored(path: Path) -> dict[str, Any]:
    return CheckedReader(str(path)).read_metadata().state_dict_metadata
