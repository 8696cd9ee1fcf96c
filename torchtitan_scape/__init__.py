"""Pretraining with sparse and compressed communication between data-parallel replicas.

`replicate` wraps the optimizer of any training loop; `Scape` is the same for the SCAPE method in one constructor. The
public names, those of `api.py`, are imported on first use, so that the planner runs where torch is not installed.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_scape.api import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [public for public in dir(import_module(f"{__name__}.api")) if not public.startswith("_")]
    # An unknown name, or that of a submodule, which Python imports itself, must not import torch.
    if f" as {name}\n" not in Path(__file__).with_name("api.py").read_text():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.api"), name)


if sys.argv[:1] == ["-m"]:  # Python looks up the module that it will run
    from torchtitan_scape.core.command import end_in_one_line, is_own_command

    if is_own_command(sys.orig_argv):
        sys.excepthook = end_in_one_line
