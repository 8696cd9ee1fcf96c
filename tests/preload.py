"""What tests/server.py loads once for all its forks: trainer, a parsed recipe and its model, the corpus."""

import gc
import importlib

import torch
from datasets.distributed import split_dataset_by_node

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

from tests import test_training  # noqa: E402
from torchtitan_scape.config.parsing import parse  # noqa: E402
from torchtitan_scape.data import standard_library  # noqa: E402
from torchtitan_scape.data.identity import data_digest  # noqa: E402
from torchtitan_scape.methods.registry import METHODS  # noqa: E402
from torchtitan_scape.models.registry import workload_of  # noqa: E402
from torchtitan_scape.runtime.agreement import code_versions  # noqa: E402

workload_of(parse(test_training.RECIPE))
code_versions()
for _entry in METHODS.values():
    _ = _entry.method  # imports its module
data_digest(split_dataset_by_node(standard_library.load_train(), 0, 1))  # as every reader has it
standard_library.load_validation()
gc.collect()
gc.freeze()  # otherwise a garbage collection in a fork would write to every page of memory, and so copy it
