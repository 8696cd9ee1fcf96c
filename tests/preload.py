"""Imports and files that tests/server.py loads once for all its forks: trainer, a parsed recipe, the corpus."""

import gc
import importlib

import torch

torch.set_num_threads(1)
for _name in (
    "tests.docstrings",
    "torchtitan_scape.titan",  # selects the device before a test imports TorchTitan
    "tests.test_training",
    "torchtitan_scape.runtime.launch",
    "torchtitan_scape.trainer.command",
    "torch.utils.tensorboard",
):
    importlib.import_module(_name)

from torchtitan_scape.config.parsing import parse  # noqa: E402
from torchtitan_scape.data import standard_library  # noqa: E402
from torchtitan_scape.methods.registry import METHODS  # noqa: E402

parse(["--job.config_file=train_configs/embedded.toml"])
for _entry in METHODS.values():
    _ = _entry.method  # imports its module
standard_library.load_train()
standard_library.load_validation()
gc.collect()
gc.freeze()  # otherwise a garbage collection in a fork would write to every page of memory, and so copy it
