"""Shared fixtures: pools of gloo processes.

The suite runs on the CPU with gloo, on machines with GPUs too: they are hidden before torch is imported, unless
SCAPE_GPU_TESTS=1 asks for tests/gpu.
"""

import os

if os.environ.get("SCAPE_GPU_TESTS") != "1":
    for _name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ[_name] = ""

import subprocess
import sys
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


# The kernels in Triton's interpreter take one core for minutes: in a process beside the other tests, asked last.
INTERPRETED = "test_kernels_in_the_interpreter"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == INTERPRETED)


@pytest.fixture(scope="session", autouse=True)
def interpreter(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str] | None]:
    if not any(item.name == INTERPRETED for item in request.session.items):
        yield None
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/kernels/interpreted"]
    process = subprocess.Popen(
        command,
        cwd=request.config.rootpath,
        env={**os.environ, "PYTHONPATH": str(request.config.rootpath), "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.wait()
