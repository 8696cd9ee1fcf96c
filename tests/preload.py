"""What tests/server.py imports and reads once, for all that it forks: the trainer, a parsed recipe, the corpus."""

import functools
import gc
import importlib

import torch
from tyro import _docstrings

from torchtitan_scape.titan import device

torch.set_num_threads(1)
device.prepare()
for _name in (
    "tests.test_training",
    "torchtitan_scape.runtime.launch",
    "torchtitan_scape.train",
    "torch.utils.tensorboard",
):
    importlib.import_module(_name)

from torchtitan_scape.config.parsing import parse  # noqa: E402
from torchtitan_scape.data import standard_library  # noqa: E402

# The parser reads the sources of all sections, and forgets what it found: most of what it takes.
_docstrings.get_field_docstring = functools.cache(_docstrings.get_field_docstring)
parse(["--job.config_file=train_configs/embedded.toml"])
standard_library.load_train()
standard_library.load_validation()
gc.collect()
gc.freeze()  # a child's collection would write to, and so copy, every page
