"""Shared fixtures: pools of gloo processes, one of 2 and one of 4 ranks a session.

The suite runs on the CPU with gloo, on machines with GPUs too: they are hidden before torch is imported, unless
SCAPE_GPU_TESTS=1 asks for tests/gpu.
"""

import os

if os.environ.get("SCAPE_GPU_TESTS") != "1":
    for _name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ[_name] = ""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.pool import Pool
from torchtitan_scape import device

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)
device.prepare()
settings.register_profile("suite", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()
