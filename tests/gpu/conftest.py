"""Selection of the tests of one process: `scripts/gpu_check.sh correctness` starts several processes."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SCAPE_GPU_TESTS=smoke: one case per test. SCAPE_GPU_SHARE=i/n: every n-th case, starting with the i-th."""
    if os.environ.get("SCAPE_GPU_TESTS") == "smoke":
        tests = [item for item in items if isinstance(item, pytest.Function)]
        items[:] = {test.originalname: test for test in reversed(tests)}.values()
    first, _, every = os.environ.get("SCAPE_GPU_SHARE", "0/1").partition("/")
    items[:] = items[int(first) :: int(every)]
