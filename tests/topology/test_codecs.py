"""BF16 on the wire: added up in FP32, in the order of the ranks, without a decoded copy of what has arrived."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from topology.codecs import Bfloat16

# What cancels, overflows, underflows, and is lost in another order.
ODD = (1e30, -1e30, 1.0, 2.0**-20, 3.4e38, 1e-42, -0.0, float("inf"), float("nan"))


def messages_of(rows: int, entries: int) -> Tensor:
    """uint8 (rows, bytes): normal numbers of many sizes, then odd ones in every combination of neighbours."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(-20, 20, (rows, entries), generator=generator).float().exp2()
    plain = torch.randn(rows, entries, generator=generator) * sizes
    odd = torch.tensor(ODD)[torch.randint(len(ODD), (rows, entries), generator=generator)]
    return Bfloat16().encode(torch.cat((plain, odd), 1))


class Made(TorchDispatchMode):
    """The entries of the largest tensor that operations make."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.numel())
        return result


def test_parts_are_added_in_rank_order_without_a_copy() -> None:
    rows, entries = 5, 4096
    messages, found = messages_of(rows, entries), torch.full((2 * entries,), torch.nan)
    with Made() as made:
        Bfloat16().decode_and_sum(messages, found)
    assert made.largest == 0  # the first form took FP32 (rows, entries)
    expected = torch.zeros(2 * entries)
    for row in messages.view(torch.bfloat16).float():
        expected = expected + row
    known = ~expected.isnan()
    assert torch.equal(known, ~found.isnan()) and 0 < int(known.sum()) < 2 * entries
    assert torch.equal(found.view(torch.int32)[known], expected.view(torch.int32)[known])
    backwards = messages.flip(0).view(torch.bfloat16).float().sum(0)
    assert not torch.equal(backwards[known], expected[known])  # so that the order is seen
