"""SCAPE with a sharded update, with replicas as threads: equality with Algorithm 1, bytes and memory."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.marks import covering
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import DENSE, SPARSE, draw, flat, gradient, make_scape, positions, train
from torchtitan_scape import Scape
from torchtitan_scape.kernels.scape.blocks import assign_owners
from torchtitan_scape.kernels.scape.reference import unpack_bits


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 9))
def test_uncompressed_tensors_are_divided_evenly_among_owners(sizes: list[int], replicas: int) -> None:
    pieces = assign_owners(sizes, replicas)
    entries = [(p.tensor, i) for p in pieces for i in range(p.start, p.end)]
    assert entries == [(tensor, i) for tensor, size in enumerate(sizes) for i in range(size)]
    owners = [p.owner for p in pieces]
    assert owners == sorted(owners) and all(0 <= owner < replicas for owner in owners)
    owned = [sum(p.end - p.start for p in pieces if p.owner == r) for r in range(replicas)]
    assert max(owned) <= -(-sum(sizes) // (4 * replicas)) * 4


@pytest.mark.parametrize("selection", ["block", "tensor"])
def test_applied_and_pending_updates_are_conserved(selection: str) -> None:
    """Property 2, exactly: every entry is sent or stored; the shared part of the state is stored by one owner only."""
    shapes = SPARSE + DENSE

    def work(collectives: ThreadCollectives) -> None:
        parameters = [nn.Parameter(p) for p in draw(0, shapes)]
        options: dict[str, Any] = {"density": 0.1, "selection": selection, "update": "sharded"}
        optimizer = make_scape(parameters, lr=1e-2, block_size=16, replicas=collectives, **options)
        passes: Any = optimizer.method.passes
        owner = passes.owner
        sent: list[Tensor] = []
        reduce_scatter = collectives.reduce_scatter

        def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.clone())
            return reduce_scatter(tensor, *args, **kwargs)

        collectives.reduce_scatter = spy  # type: ignore[method-assign]
        moved = 0
        for step in range(6):
            own = gradient(step, collectives.replica, shapes)
            for p, g in zip(parameters, own, strict=True):
                p.grad = g.clone()
            optimizer.finish_previous_step()
            before, common = [s.clone() for s in passes.states], owner.common.clone()
            held = [passes.layout.bits(optimizer.method.masks.previous, i) for i in range(passes.sparsified)]
            sent.clear()
            optimizer.step()
            if step < 3:
                continue
            for i, piece in enumerate(owner.ownership.sparse):
                used = torch.zeros(passes.sizes[i], dtype=torch.bool)
                used[positions(optimizer, i)] = True
                new = before[i] + (1 - 0.9) * own[piece.tensor].view(-1)[piece.start : piece.end]
                assert not passes.states[i][used].any()
                got = passes.states[i].clone()
                got[used] = sent[0][passes.payload_layout.positions[i] :][: used.sum()]
                torch.testing.assert_close(got, new, rtol=0, atol=1e-7)
                if i in owner.own:
                    kept, was = (passes.owner.share_of(buffer, i)[~used] for buffer in (passes.owner.common, common))
                    assert held[i] is not None
                    left = unpack_bits(held[i], passes.sizes[i])[~used]
                    assert torch.equal(kept, torch.where(left, was * 0.9, was))
                    moved += int((left & (was != 0)).sum())

        assert moved > 0

    run_replicas(3, work)


BYTES: list[tuple[dict[str, Any], float]] = [
    ({}, 1.02),
    ({"bf16_weights": True}, 0.77),
    ({"code": "int8", "bf16_weights": True}, 0.52),
]


@pytest.mark.parametrize("replicas, options, most", covering((n, *case) for n, case in product((2, 3, 4), BYTES)))
def test_bytes_of_the_sharded_update_relative_to_an_all_reduce(
    replicas: int, options: dict[str, Any], most: float
) -> None:
    """Without the bytes of masks and without the dense first step, over equal numbers of steps."""

    def sent(**more: Any) -> float:
        def work(collectives: ThreadCollectives) -> float:
            after: list[float] = []

            def count(optimizer: Scape, step: int) -> None:
                kinds = collectives.ledger.sent.items()
                after.append(sum(value for (_, _, kind), value in kinds if kind in ("payload", "values")))
                if step == 3:
                    masks = collectives.gathered_bytes(optimizer.method.passes.layout.wire_bytes(0.1, "block"))
                    assert optimizer.planned_bytes() - masks == pytest.approx((after[3] - after[1]) / 2)

            train(collectives, 4, [(64, 64), (40, 100), (64,), (1000,)], count, density=0.1, **more)
            return after[3] - after[0]

        return sum(run_replicas(replicas, work))

    assert sent(update="sharded", **options) <= most * sent()


def test_weights_loaded_after_construction_are_used() -> None:
    """The first step creates the master, because a checkpoint's weights are loaded after the optimizer was built."""

    def work(collectives: ThreadCollectives) -> float:
        parameters = [nn.Parameter(p) for p in draw(0, SPARSE + DENSE)]
        more: dict[str, Any] = {"update": "sharded"}
        optimizer = make_scape(parameters, lr=1e-3, block_size=16, replicas=collectives, **more)
        loaded = draw(9, SPARSE + DENSE)
        for p, value, g in zip(parameters, loaded, gradient(0, 0, SPARSE + DENSE), strict=True):
            p.data.copy_(value)
            p.grad = g
        optimizer.step()
        return (flat([p.detach() for p in parameters]) - flat(loaded)).abs().max().item()

    assert max(run_replicas(2, work)) < 0.01


def test_the_payload_is_the_only_buffer_of_full_size() -> None:
    """There is no copy of the last moment and no full state of uncompressed tensors, only n / N shared entries."""

    def work(collectives: ThreadCollectives) -> None:
        passes: list[Any] = []
        more: dict[str, Any] = {"density": 0.1, "update": "sharded"}
        train(collectives, 2, [(64, 64), (100,)], lambda o, s: passes.append(o.method.passes), **more)
        one = passes[0]
        assert one.moment_on_mask.numel() == one.code_residual.numel() == one.owner.master.numel() == 0
        assert one.owner.common.numel() == 64 * 64 // 2 + 52
        assert one.storage.flat.numel() == 64 * 64

    run_replicas(2, work)


def test_transposed_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'group0\.0' is not contiguous"):
        make_scape([nn.Parameter(torch.ones(4, 6).t())], lr=0.1, update="sharded")
