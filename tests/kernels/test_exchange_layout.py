"""Which entries of an owner's errors a coded exchange has to read."""

import pytest
import torch

from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.kernels.exchange.layout import BlockSlices


def slices(replica: int, errors: list[torch.Tensor], errors_elsewhere: bool | None) -> BlockSlices:
    """Four blocks of 32 in two messages: three rows with gaps between them, and a short vector."""
    code = block_code("torch", "2bit", 32)
    return BlockSlices(errors, errors, code, 4 * 32, 2, replica, errors, errors_elsewhere=errors_elsewhere)


@pytest.mark.parametrize("entry", [(0, 0), (1, 31), (2, 0), (3, 4)], ids=str)
@pytest.mark.parametrize("replica", [0, 1])
def test_errors_of_other_messages_are_found(replica: int, entry: tuple[int, int]) -> None:
    block, at = entry
    errors = [torch.zeros(6, 32)[::2], torch.zeros(5)]
    (errors[0][block] if block < 3 else errors[1])[at] = 1.0
    chunk = slices(replica, errors, None)
    assert chunk.has_errors_elsewhere() == (block // 2 != replica)
    for error in errors:
        error.zero_()  # as an exchange that was applied
    assert not chunk.has_errors_elsewhere() and chunk.errors_elsewhere is False


def test_errors_are_not_read_if_it_is_known_where_they_are() -> None:
    unreadable = [torch.zeros(3, 32, device="meta"), torch.zeros(5, device="meta")]
    assert [slices(0, unreadable, known).has_errors_elsewhere() for known in (False, True)] == [False, True]
