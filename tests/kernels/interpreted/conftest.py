"""With all examples, the accesses of every kernel are checked."""

from collections.abc import Iterator

import pytest

from tests.kernels.accesses import checked_accesses
from tests.marks import ALL_EXAMPLES


@pytest.fixture(autouse=ALL_EXAMPLES)
def accesses_are_checked() -> Iterator[None]:
    with checked_accesses():
        yield
