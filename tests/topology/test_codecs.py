"""BF16 messages: summed in FP32, in rank order, without a decoded copy of the messages."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_scape.topology.codecs import Bfloat16

# Values that cancel, overflow or underflow, and whose sum depends on the order.
ODD = (1e30, -1e30, 1.0, 2.0**-20, 3.4e38, 1e-42, -0.0, float("inf"), float("nan"))


def messages_of(rows: int, entries: int) -> Tensor:
    """Return uint8 (rows, bytes): normally distributed numbers of many magnitudes, then random special values."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(-20, 20, (rows, entries), generator=generator).float().exp2()
    plain = torch.randn(rows, entries, generator=generator) * sizes
    odd = torch.tensor(ODD)[torch.randint(len(ODD), (rows, entries), generator=generator)]
    return Bfloat16().encode(torch.cat((plain, odd), 1))


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that operations create."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.numel())
        return result


def test_messages_are_added_in_rank_order_without_a_copy() -> None:
    rows, entries = 5, 4096
    messages, found = messages_of(rows, entries), torch.full((2 * entries,), torch.nan)
    with LargestTensor() as created:
        Bfloat16().decode_and_sum(messages, found)
    assert created.largest == 0  # no FP32 (rows, entries)
    expected = torch.zeros(2 * entries)
    for row in messages.view(torch.bfloat16).float():
        expected = expected + row
    known = ~expected.isnan()
    assert torch.equal(known, ~found.isnan()) and 0 < int(known.sum()) < 2 * entries
    assert torch.equal(found.view(torch.int32)[known], expected.view(torch.int32)[known])
    backwards = messages.flip(0).view(torch.bfloat16).float().sum(0)
    assert not torch.equal(backwards[known], expected[known])  # the test detects another order
