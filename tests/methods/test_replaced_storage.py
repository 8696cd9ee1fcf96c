"""Parameters whose storage is replaced between two steps, as by a conversion or a load."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.exchange_checks import sparta
from tests.toy import DENSE, SPARSE, draw, flat, gradient, make_scape
from torchtitan_scape.kernels.exchange.layout import FIRST, SECOND, BlockSlice
from torchtitan_scape.methods.coded_exchange import CodedExchange
from torchtitan_scape.topology.collectives import ReplicaCollectives


def check_scape(kernels: str, **options: Any) -> None:
    """Parameters whose storage is replaced between two steps are updated as others are, and rates may change."""

    def work(replaces: bool) -> Tensor:
        parameters = [nn.Parameter(p) for p in draw(0, SPARSE[:2] + DENSE)]
        optimizer = make_scape(parameters, lr=1e-2, density=0.3, block_size=16, kernels=kernels, **options)
        for step in range(4):
            for p, g in zip(parameters, gradient(step, 0, SPARSE[:2] + DENSE), strict=True):
                p.grad = g
                if replaces and step == 2:
                    p.data = p.data.clone()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        return flat([p.detach() for p in parameters])

    assert torch.equal(work(True), work(False))


def check_sparta(kernels: str) -> None:
    """The groups of the first step are exchanged again after the replacement."""
    options = {"steps": 4, "code": "1bit_unbiased", "interval": 2, "warmup_steps": 0}
    one, other = (sparta("cpu", kernels, 2, torch.float32, replaced=step, **options) for step in (0, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_scape_updates_a_new_storage(update: str) -> None:
    check_scape("torch", update=update)


def test_sparta_exchanges_a_new_storage() -> None:
    check_sparta("torch")


def test_views_of_replaced_tensors_are_not_kept() -> None:
    """They would keep the memory. A chunk that is not exchanged soon has none either."""
    device = torch.device("cpu")
    alone = ReplicaCollectives(None)
    exchange = CodedExchange(alone, None, 32, device, 1, None, repeats=True, subtracts=True)
    chunks = [exchange.chunk([BlockSlice(0, first, 32, 32, 0)], 32) for first in (0, 32)]
    anchors, old, new = ([torch.zeros(64)] for _ in range(3))
    exchange.set(FIRST, anchors)
    for tensors, kept in ((old, set()), (old, {FIRST, SECOND}), (new, {FIRST})):
        exchange.set(SECOND, tensors)
        assert all(set(chunk.views) == kept for chunk in chunks)
        for chunk in chunks:
            exchange.finish(exchange.start(chunk, False), torch.tensor(True))
            view = chunk.views[SECOND][0]
            assert view is not None and view.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
