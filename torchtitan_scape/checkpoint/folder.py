"""Contents of checkpoint folders, the same on all ranks."""

import os
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torchtitan_scape.checkpoint.metadata import RUN_METADATA
from torchtitan_scape.checkpoint.reader import load_into
from torchtitan_scape.checkpoint.record_format import parse_record
from torchtitan_scape.checkpoint.safe_load import CheckedReader
from torchtitan_scape.checkpoint.storage import find_damage


def read_record(path: str) -> dict[str, Any]:
    """Return the record of the run that saved, under the present names. Collective.

    Raises:
        ValueError: it cannot be read, is damaged, or is of a later format.
    """
    state: dict[str, Any] = {RUN_METADATA: {"json": ""}}
    load_into(path, state)
    return parse_record(state[RUN_METADATA]["json"], path)


def names_in(path: str) -> set[str]:
    """Return the names of all entries of a checkpoint, such as "train_state.step", and their first parts."""
    names = set(CheckedReader(path).read_metadata().state_dict_metadata)
    return names | {name.split(".")[0] for name in names}


def steps_in(folder: str) -> list[int]:
    """Return the steps that have a folder, in ascending order."""
    if not os.path.isdir(folder):
        return []
    found = [re.fullmatch(r"step-(\d+)", name) for name in os.listdir(folder)]
    return sorted(int(match[1]) for match in found if match)


def call_on_rank_0(function: Callable[[], Any]) -> Any:
    """Return the result of `function` on rank 0: nodes may have different views of a shared file system. Collective.

    Raises:
        OSError, ValueError: on every rank, if `function` raises it on rank 0.
    """
    seen: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            seen[0] = function()
        except (OSError, ValueError) as error:
            seen[1] = error
    dist.broadcast_object_list(seen, src=0)
    if seen[1] is not None:
        raise seen[1]
    return seen[0]


def first_damage(path: str) -> str | None:
    """Return a description of the first damage, or None. Collective: each rank reads some of the files."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, find_damage(path, dist.get_rank(), dist.get_world_size()))
    return next((text for text in found if text is not None), None)
