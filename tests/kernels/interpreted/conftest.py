"""With all examples, the accesses of every kernel are checked."""

import os
from collections.abc import Iterator

import pytest

from tests.kernels.accesses import checked_accesses


@pytest.fixture(autouse=os.environ.get("SCAPE_ALL_EXAMPLES") == "1")
def accesses_are_checked() -> Iterator[None]:
    with checked_accesses():
        yield
