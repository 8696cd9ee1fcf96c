"""Flipped bits are detected at the next check, named on all ranks, and repaired if there is a majority."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.marks import slow
from tests.methods.scape.test_offload import kept, run
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import draw, flat
from torchtitan_scape import AdamS, Scape
from torchtitan_scape.core import consistency
from torchtitan_scape.core.consistency import (
    ReplicasDifferError,
    ReplicatedTensors,
    check_replicas_equal,
    fingerprints,
)
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.kernels.scape.reference import unpack_bits
from torchtitan_scape.methods.dense.method import Dense, DenseOptions
from torchtitan_scape.methods.interface import MethodContext

CPU = torch.device("cpu")
FORMS: dict[str, dict[str, Any]] = {
    "local": {},
    "warm-up": {"density_warmup_steps": 5, "selection": "tensor", "staleness_scaling": False},
    "odd blocks": {"block_size": 24},
    "offload": {"offload": ["state"], "code": "int8"},
    "gather": {"update": "sharded", "offload": ["state"]},
    "gather bf16": {"update": "sharded", "bf16_weights": True},
}


def flip(tensor: Tensor, bit: int) -> None:
    data = tensor.detach().view(-1).view(torch.uint8)
    data[bit // 8 % data.numel()] ^= 1 << bit % 8


def fingerprint(tensor: Tensor) -> int:
    return int(fingerprints([tensor], CPU))


def check(optimizer: Scape, collectives: ThreadCollectives, step: int, repair: bool = False) -> bool:
    optimizer.finish_previous_step()
    return check_replicas_equal(collectives, optimizer.method.replicated_tensors(), CPU, step, repair)


def comparable_parts(shared: list[ReplicatedTensors]) -> list[tuple[int, int]]:
    """Return (parameter, part) of all compared tensors except step counts."""
    return [(i, j) for i, one in enumerate(shared[:-1]) for j, (_, part) in enumerate(one.parts) if part.numel()]


# ------------------------------------------------------------------------------------------------- hashes


@given(
    st.integers(0, 30_000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool]),
    st.integers(0, 9),
    st.integers(0, 10**7),
    st.sampled_from([8 * 1021, 64, 1 << 26]),
)
def test_any_flipped_bit_changes_the_hash(size: int, dtype: torch.dtype, skip: int, bit: int, chunk: int) -> None:
    """Any dtype, size and alignment; also two bits of different words."""
    values = torch.randint(0, 2, (size + skip,), generator=torch.Generator().manual_seed(size)).to(dtype)[skip:]
    with patch.object(consistency, "_CHUNK_BYTES", chunk):
        before = fingerprint(values)
        assert fingerprint(values.clone()) == before
        if not size:
            return
        if dtype == torch.bool:
            values[bit % size] ^= True
        else:
            flip(values, bit)
        once = fingerprint(values)
        assert once != before
        if dtype != torch.bool and values.nbytes > 8:
            flip(values, bit + 64)
            assert fingerprint(values) not in (before, once)


def test_swapped_entries_and_rows_change_the_hash() -> None:
    values = draw(0, [(64, 96)])[0]
    before = fingerprint(values)
    for first, second in ((0, 1), (5, 4097), (3, 2047)):
        swapped = values.clone().view(-1)
        swapped[[first, second]] = swapped[[second, first]]
        assert fingerprint(swapped) != before
    rows = values.clone()
    rows[[3, 35]] = rows[[35, 3]]
    assert fingerprint(rows) != before
    assert (
        fingerprint(values.t().contiguous().t()) == before
    )  # The hash depends on the entries, not on the memory layout.


# ----------------------------------------------------------------------------------------------- the check


@pytest.mark.parametrize("shared", [[], [ReplicatedTensors("p", []), ReplicatedTensors("q", [])]])
def test_replicas_that_share_nothing_are_not_compared(shared: list[ReplicatedTensors]) -> None:
    assert run_replicas(2, lambda collectives: check_replicas_equal(collectives, shared, CPU, 1, False)) == [True] * 2


@pytest.mark.parametrize(
    "form, replicas",
    [
        ("local", 4),
        ("odd blocks", 4),
        ("gather bf16", 2),
        *(slow(form, 4) for form in FORMS if form not in ("local", "odd blocks")),
        slow("local", 2),
    ],
)
def test_a_flipped_bit_is_detected_and_named(form: str, replicas: int) -> None:
    """One bit of some tensors of every kind. No false alarm before, with skipped steps and masks in flight."""
    seen = set()

    def work(collectives: ThreadCollectives) -> None:
        def probe(optimizer: Scape, model: nn.Module, step: int) -> None:
            assert check(optimizer, collectives, step)
            if step != 8:
                return
            generator = torch.Generator().manual_seed(7)
            shared = optimizer.method.replicated_tensors()
            by_kind: dict[str | None, list[tuple[int, int]]] = {}
            for i, j in comparable_parts(shared):
                by_kind.setdefault(shared[i].parts[j][0], []).append((i, j))
            for i, j in (place for found in by_kind.values() for place in found[1::4]):
                kind, part = shared[i].parts[j]
                odd, bit = (int(torch.randint(0, n, (), generator=generator)) for n in (replicas, 8 * part.nbytes))
                seen.add(kind)
                if collectives.replica == odd:
                    flip(part, bit)
                others = consistency._ranks([r for r in range(replicas) if r != odd])
                what = f"{kind} of {shared[i].name!r}" if kind else repr(shared[i].name)
                expected = (
                    f"rank {odd}'s {what} differs from {others}:"
                    if replicas > 2
                    else f"ranks 0 and 1 differ in {what} without a majority"
                )
                with pytest.raises(ReplicasDifferError) as caught:
                    check(optimizer, collectives, step)
                assert f"step 8: {expected}" in str(caught.value), str(caught.value)
                collectives.gather_objects(None)
                if collectives.replica == odd:
                    flip(part, bit)
            assert check(optimizer, collectives, step)

        run(collectives, 10, probe=probe, **FORMS[form])

    run_replicas(replicas, work)
    assert {None, "mask", "previous mask"} <= seen
    assert ("scale" in seen) == (form == "gather bf16")
    assert ("visit rates" in seen) == (form != "warm-up")


@pytest.mark.parametrize("form", ["local", slow("offload"), "gather bf16"])
def test_an_immediate_repair_leaves_no_trace(form: str) -> None:
    """Parameters of all steps and the final state equal those of an undisturbed run, per-replica residuals included."""

    def work(collectives: ThreadCollectives) -> None:
        history, optimizer, _ = run(collectives, 14, **FORMS[form])
        generator = torch.Generator().manual_seed(3)

        def draw_below(bound: int) -> int:
            return int(torch.randint(0, bound, (), generator=generator))

        def probe(optimizer: Scape, model: nn.Module, step: int) -> None:
            for _ in range(4 if step in (1, 4, 7) else 0):  # Dense masks, a skipped step, and an ordinary step.
                optimizer.finish_previous_step()
                shared = optimizer.method.replicated_tensors()
                where = comparable_parts(shared)
                i, j = where[draw_below(len(where))]
                part = shared[i].parts[j][1]
                odd, bit = draw_below(3), draw_below(8 * part.nbytes)
                if collectives.replica == odd:
                    flip(part, bit)
                assert not check(optimizer, collectives, step, repair=True)
            assert step % 3 or check(optimizer, collectives, step)

        repaired, other, _ = run(collectives, 14, probe=probe, **FORMS[form])
        for step, (want, got) in enumerate(zip(history, repaired, strict=True)):
            assert torch.equal(flat(want), flat(got)), step
        want_state, state = kept(optimizer), kept(other)
        assert all(torch.equal(want_state[key], state[key]) for key in want_state)

    run_replicas(3, work)


def state_on_mask(optimizer: Scape) -> list[Tensor]:
    """Return the state of every tensor of the passes, zero outside the mask on which it is replicated."""
    layout, states = optimizer.method.masks.layout, optimizer.method.passes.kept()
    bits = [layout.bits(optimizer.method.masks.previous, i) for i in range(len(layout.sizes))]
    return [
        s.clone() if b is None else torch.where(unpack_bits(b, s.numel()), s, 0.0)
        for s, b in zip(states, [*bits, *[None] * (len(states) - len(bits))], strict=True)
    ]


@pytest.mark.parametrize(
    "form, hit",
    [("local", "moment"), slow("offload", "parameter"), slow("gather", "parameter"), ("gather bf16", "parameter")],
)
def test_a_later_repair_makes_replicas_equal_again(form: str, hit: str) -> None:
    """A bit flips after step 6, and the check runs at step 9. A flipped moment, which is not hashed, is visible in the
    parameters.
    """
    warned: list[str] = []

    def work(collectives: ThreadCollectives) -> tuple[list[list[Tensor]], list[Tensor]]:
        def probe(optimizer: Scape, model: nn.Module, step: int) -> None:
            optimizer.finish_previous_step()
            if step == 6 and collectives.replica == 1:
                if hit == "moment":
                    states = optimizer.method.passes.kept()
                    for state, held in zip(states, state_on_mask(optimizer), strict=True):
                        state[held != 0] *= 1.5
                else:
                    parts = optimizer.method.replicated_tensors()[0].parts
                    flip(next(part for kind, part in parts if kind is None), 20)
            if step == 9:
                assert not check(optimizer, collectives, step, repair=True)
            if step > 9:
                assert check(optimizer, collectives, step)

        history, optimizer, _ = run(collectives, 20, probe=probe, **FORMS[form])
        return history, state_on_mask(optimizer)

    with patch.object(consistency.logger, "warning", warned.append):
        results = run_replicas(3, work)
    assert len(warned) == 3 and all("rank 1's" in line and "overwritten" in line for line in warned)
    for history, state in results[1:]:
        assert all(torch.equal(flat(history[step]), flat(results[0][0][step])) for step in range(10, 20))
        if "gather" not in form:
            assert torch.equal(flat(state), flat(results[0][1]))
    assert not torch.equal(flat(results[1][0][8]), flat(results[0][0][8]))
    clean = run_replicas(3, lambda c: run(c, 20, **FORMS[form])[0])[0]
    # The small effect on the other replicas before the repair remains.
    assert (flat(results[0][0][-1]) - flat(clean[-1])).norm() < 0.02 * flat(clean[-1]).norm()


@pytest.mark.parametrize("make", [AdamS, torch.optim.AdamW], ids=["AdamS", "AdamW"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_dense_baselines(make: Callable[..., Any], replicas: int) -> None:
    def work(collectives: ThreadCollectives) -> list[Tensor]:
        model = nn.ParameterList(draw(0, [(7, 9), (5,)]))
        optimizer = make(model.named_parameters(), lr=1e-2)
        for step in range(4):
            for p, g in zip(model, draw(step, [(7, 9), (5,)]), strict=True):
                p.grad = g
            optimizer.step()
            context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
            shared = Dense(context, DenseOptions()).replicated_tensors()
            assert check_replicas_equal(collectives, shared, CPU, step, False)
        for key in (None, "exp_avg", "step"):
            part = next(part for kind, part in shared[0].parts if kind == key)
            before = part.clone()
            if collectives.replica == replicas - 1:
                flip(part, 77)
            if replicas == 2:
                with pytest.raises(
                    ReplicasDifferError, match=r"ranks 0 and 1 differ in .*'0' without .* needs a majority"
                ):
                    check_replicas_equal(collectives, shared, CPU, 4, True)
                collectives.gather_objects(None)
                part.detach().copy_(before)
            else:
                assert not check_replicas_equal(collectives, shared, CPU, 4, True)
            assert torch.equal(part, before)
        return [p.detach() for p in model]

    assert len({tuple(flat(values).tolist()) for values in run_replicas(replicas, work)}) == 1


def test_many_differences_are_one_line_and_a_stuck_bit_ends_the_run() -> None:
    def work(collectives: ThreadCollectives) -> tuple[str, str]:
        tensors = draw(0, [(4, 4)] * 6)
        shared = [ReplicatedTensors(f"p{i}", [(None, tensor)]) for i, tensor in enumerate(tensors)]
        if collectives.replica in (1, 4):
            for tensor in tensors[:4]:
                flip(tensor, 3)
        with pytest.raises(ReplicasDifferError) as caught:
            check_replicas_equal(collectives, shared, CPU, 5, False)
        stuck = patch.object(consistency, "_repair", lambda *args: None)
        with stuck if collectives.replica == 0 else patch.object(consistency, "_ranks", consistency._ranks):
            collectives.gather_objects(None)
            with pytest.raises(ReplicasDifferError) as again:
                check_replicas_equal(collectives, shared, CPU, 5, True)
            collectives.gather_objects(None)
        return str(caught.value), str(again.value)

    for message, again in run_replicas(5, work):
        assert "ranks 1 and 4: 'p0' and 3 more differ from ranks 0, 2 and 3" in message and "\n" not in message
        assert again.startswith("after a repair at step 5: ")
    assert ReplicasDifferError.exit_code == 3


def test_a_repair_changes_the_version_of_a_tensor() -> None:
    """Lists that kernels keep of a mask are made again if `Tensor._version` changes, as no collective does."""

    class Collectives:
        def broadcast(self, values: Tensor, source: int) -> None:
            values.data.fill_(7)  # like a collective, without a new version

    bits = torch.zeros(8, dtype=torch.uint8)
    shared = ReplicatedTensors("weight", [("mask", bits)])
    finding, before = consistency._Mismatch(shared, (1,), 0, (0,)), bits._version
    collectives: Any = Collectives()
    consistency._repair(finding, collectives, CPU, 1)
    assert bits.tolist() == [7] * 8 and bits._version > before
