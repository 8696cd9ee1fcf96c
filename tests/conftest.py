"""Shared fixtures: pools of gloo processes.

The suite runs on the CPU with gloo, on machines with GPUs too: they are hidden before torch is imported, unless
SCAPE_GPU_TESTS asks for tests/gpu, which needs no package besides pytest, numpy, torch and triton.
"""

import gc
import importlib
import os

if not os.environ.get("SCAPE_GPU_TESTS"):
    for _name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ[_name] = ""
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # OpenMP's threads do not survive a fork, and a test would wait for them

import pytest

from tests import server
from tests.pool import Pool

ON_GPU = bool(os.environ.get("SCAPE_GPU_TESTS"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not ON_GPU:
    from hypothesis import settings

    settings.register_profile("suite", deadline=None, max_examples=25, derandomize=True, database=None)
    settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    if ON_GPU:
        return
    if config.getoption("numprocesses", None):  # the workers run the tests, and share this server
        server.address()
        return
    import torch

    torch.set_num_threads(1)
    importlib.import_module("torchtitan_scape.titan")  # selects the device before a test imports TorchTitan


@pytest.fixture(scope="session")
def pool1() -> Pool:
    return Pool(1)


@pytest.fixture(scope="session")
def pool2() -> Pool:
    return Pool(2)


@pytest.fixture(scope="session")
def pool3() -> Pool:
    return Pool(3)


@pytest.fixture(scope="session")
def pool4() -> Pool:
    return Pool(4)


# The longest tests start first, so that the streams of run_tests.sh end at about the same time.
LONGEST = ("test_training", "test_triton", "test_resume", "test_slurm", "test_contract", "test_manager", "test_literal")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    # Imports have made 400,000 objects, which every full collection, and every new optimizer's search for DDP modules,
    # would visit again: 0.1 s each.
    gc.collect()
    gc.freeze()
