"""Imports and data that tests/server.py loads once for all its forks.

The trainer, a parsed recipe and its model, and the corpus."""

import gc
import importlib
from typing import Any

import torch
from datasets.distributed import split_dataset_by_node

torch.set_num_threads(1)
for _name in (
    "torchtitan_scape.titan",  # selects the device before a test imports TorchTitan
    "tests.training",
    "torchtitan_scape.runtime.launcher",
    "torchtitan_scape.trainer.command",
    "torch.utils.tensorboard",
):
    importlib.import_module(_name)

from tests import training  # noqa: E402
from torchtitan_scape.config.parsing import parse  # noqa: E402
from torchtitan_scape.data import loader  # noqa: E402
from torchtitan_scape.data.corpora import STANDARD_LIBRARY  # noqa: E402
from torchtitan_scape.methods.registry import METHODS  # noqa: E402
from torchtitan_scape.models.registry import workload_of  # noqa: E402
from torchtitan_scape.runtime.rank_comparison import code_versions  # noqa: E402

workload_of(parse(training.RECIPE))
code_versions()
for _entry in METHODS.values():
    _ = _entry.method  # imports its module
_digest, _DIGESTS = loader.data_digest, {}


def _digest_once(data: Any) -> str:
    """Return the digest of a dataset, which is computed once for each fingerprint of its content."""
    key = getattr(data, "_fingerprint", None)
    if key is None:
        return _digest(data)
    if key not in _DIGESTS:
        _DIGESTS[key] = _digest(data)
    return _DIGESTS[key]


loader.data_digest = _digest_once
_digest_once(split_dataset_by_node(STANDARD_LIBRARY.data_set("train"), 0, 1))  # as every reader has it
STANDARD_LIBRARY.data_set("validation")
gc.collect()
gc.freeze()  # otherwise a garbage collection in a fork would write to every page of memory, and so copy it
