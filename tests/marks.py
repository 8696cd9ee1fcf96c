"""Parameters of tests that run only with `./run_tests.sh --slow`."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return parameters that are left out of the default run: further cases of a property that others show there."""
    return pytest.param(*values, marks=pytest.mark.slow)
