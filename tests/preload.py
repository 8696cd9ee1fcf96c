"""Imports and files that tests/server.py loads once for all its forks: trainer, a parsed recipe, the corpus."""

import functools
import gc
import importlib

import torch
from tyro import _docstrings

torch.set_num_threads(1)
for _name in (
    "torchtitan_scape.titan",  # selects the device before a test imports TorchTitan
    "tests.test_training",
    "torchtitan_scape.runtime.launch",
    "torchtitan_scape.trainer.command",
    "torch.utils.tensorboard",
):
    importlib.import_module(_name)

from torchtitan_scape.config.parsing import parse  # noqa: E402
from torchtitan_scape.data import standard_library  # noqa: E402

# Most of the parser's time goes into the docstrings of the config sections, which it reads from the sources each time.
_docstrings.get_field_docstring = functools.cache(_docstrings.get_field_docstring)
parse(["--job.config_file=train_configs/embedded.toml"])
standard_library.load_train()
standard_library.load_validation()
gc.collect()
gc.freeze()  # otherwise a garbage collection in a fork would write to every page of memory, and so copy it
