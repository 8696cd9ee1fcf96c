"""What tests/server.py imports and reads once, for all that it forks: the trainer, a parsed recipe, the corpus."""

import gc
import importlib

import torch

from torchtitan_scape import device

torch.set_num_threads(1)
device.prepare()
for _name in ("tests.test_training", "torchtitan_scape.runtime.launch", "torchtitan_scape.train"):
    importlib.import_module(_name)

from torchtitan_scape.config.parsing import parse  # noqa: E402
from torchtitan_scape.data import standard_library  # noqa: E402

parse(["--job.config_file=train_configs/embedded.toml"])  # the parser reads the source of every section once
standard_library.load_train()
standard_library.load_validation()
gc.collect()
gc.freeze()  # a child's collection would write to, and so copy, every page
