"""Triton kernels in Triton's interpreter on a CPU; tests/kernels/test_triton.py starts the process."""

import os
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from scripts.scape_passes import pack_all, squares_all, update_all
from tests.kernels.checks import (
    Case,
    check_entering,
    check_messages,
    check_rotate,
    check_skipped,
    check_step,
    check_written,
    torch_passes,
    triton_passes,
    used,
)
from tests.kernels.dense_checks import RULES, check_muon, check_norms, check_update
from tests.marks import ALL_EXAMPLES, covering, slow

# Ties are common; including signed zeros, denormals, infinities and the largest number.
VALUES = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, -1e-42, 3.4e38, 0.5, float("inf"), float("-inf"))


densities = st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.01])
sizes = st.lists(st.integers(0, 90), min_size=1, max_size=3).map(tuple)


@st.composite
def cases(draw: Any, **fixed: Any) -> Case:
    replicas = draw(st.integers(1, 3))
    sparse = draw(sizes)
    # Rows with and without a whole number of mask bytes.
    columns = tuple(draw(st.sampled_from([c for c in range(1, n + 1) if n % c == 0] or [8])) for n in sparse)
    options = dict(
        sparse=sparse,
        columns=draw(st.sampled_from([None, columns])),
        whole=draw(st.lists(st.integers(0, 40), max_size=2).map(tuple)),
        block_size=draw(st.sampled_from([8, 16, 24, 64])),
        replicas=replicas,
        replica=draw(st.none() | st.integers(0, replicas - 1)),
        density=draw(densities),
        in_use=draw(densities),
        previous=draw(densities),
        next=draw(densities),
        scale=draw(st.sampled_from([1.0, 3.0])),
        clip_moment=draw(st.booleans()),
        writes=draw(st.sampled_from([True, True, False])),
        gradient_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        parameter_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        offset=draw(st.sampled_from([0, 0, 1])),
        parameter_offset=draw(st.sampled_from([0, 0, 1])),
        chunk_entries=draw(st.sampled_from([0, 1, 30])),
        chunk_multiple=draw(st.sampled_from([1, 4])),
        keeps_code_error=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )
    return Case(**{**options, **fixed})


def examples(count: int) -> int:
    """Return `count` with --slow, and a sixth of it otherwise."""
    return count if ALL_EXAMPLES else max(2, count // 6)


@settings(max_examples=examples(18))
@given(cases())
@example(Case((1,), block_size=8, density=0.01, in_use=0.01, previous=0.01, next=0.01))
@example(Case((40, 1), (3,), density=0.5, in_use=0.5, previous=1.0, next=0.01, replicas=2, replica=1))
@example(Case((1,), block_size=8, density=0.1, in_use=1.0, previous=0.1, next=0.1, columns=(1,)))
@example(Case((3, 3), block_size=16, density=0.3, in_use=0.5, previous=0.5, next=0.3))
@example(Case((3, 3, 2), block_size=16, density=0.3, in_use=0.3, previous=0.5, next=0.3, keeps_code_error=True))
def test_a_step_equals_pytorch(case: Case) -> None:
    check_step(case)


@settings(max_examples=examples(15))
@given(cases(in_use=0.1, previous=0.1, density=0.1, parameter_dtype=torch.float32))
def test_a_step_at_the_target_density_equals_pytorch(case: Case) -> None:
    check_step(case)


@settings(max_examples=examples(18))
@given(cases(values=VALUES, beta1=0.0, in_use=1.0, density=1.0, scale=1.0), st.sampled_from([0.01, 0.1, 0.5, 0.99]))
def test_selection_is_exact(case: Case, density: float) -> None:
    """With beta1 = 0, mt is the gradient, also if it is not finite. Only the selection is compared."""
    check_selection(case, density)


def check_selection(case: Case, density: float) -> None:
    case = replace(case, next=density, gradient_dtype=torch.float32)
    messages = []
    for make in (torch_passes, triton_passes):
        passes = case.passes(make)
        passes.storage.flat.zero_()
        mask = case.mask(1.0, 0)
        gradients = case.draw(torch.float32, 4, case.values)
        passes.bind(case.step(case.draw(torch.float32, 5), gradients, (mask, mask)))
        messages.append(pack_all(passes))
    check_messages(*messages)


@pytest.mark.parametrize("values", [(0.0,), (1.0,), (0.0, -0.0, 1e-45)], ids=["zeros", "equal", "denormals"])
def test_all_equal_values(values: tuple[float, ...]) -> None:
    check_selection(Case((100, 7), values=values, beta1=0.0, in_use=1.0, density=1.0), 0.1)


@pytest.mark.parametrize("density, block_size", covering(product((0.1, 0.01), (1024, 2048, 40))))
def test_blocks_of_real_sizes(density: float, block_size: int) -> None:
    """Several tiles, complete and partial, owned and not owned."""
    check_step(
        Case(
            (5 * block_size + 8, 3 * block_size),
            (1030,),
            block_size,
            replicas=2,
            replica=0,
            density=density,
            in_use=density,
            previous=density,
            next=density,
        )
    )


def test_rows_and_columns_of_several_tiles() -> None:
    """Tiles of 128 rows and 512 columns, complete and partial, aligned and not; rows that end inside a byte."""
    shapes = ((150, 1032), (140, 1280), (129, 8), (33, 37))
    check_entering(
        Case(
            tuple(r * c for r, c in shapes),
            block_size=1024,
            in_use=0.3,
            previous=0.2,
            columns=tuple(c for _, c in shapes),
        )
    )


@pytest.mark.slow
def test_a_large_payload() -> None:
    """More than one complete tile in the sum of squares."""
    check_step(Case((7, 17_000), (5,), 1024, density=0.5, in_use=0.5, previous=0.5, next=0.5))


@settings(max_examples=examples(15))
@given(cases(), st.sampled_from([0.01, 0.1, 0.5]))
def test_masks_are_decoded(case: Case, density: float) -> None:
    case = replace(case, replica=None, next=density)
    if case.layout.total_blocks:
        check_rotate(case)


@pytest.mark.parametrize(
    ("block_size", "k", "replicas"),
    [
        (16, 2, 3),
        slow(24, 1, 2),
        slow(64, 12, 2),
        (128, 6, 2),
        slow(1024, 10, 3),
        slow(1024, 250, 2),
        slow(32768, 1, 2),
    ],
)
def test_encoded_offsets_are_decoded(block_size: int, k: int, replicas: int) -> None:
    """Both backends send the same bytes and set the same bits.

    Low bits inside one byte and over three bytes; no unary part (2 of 16); codes across words; short blocks; a short
    last run.
    """
    case = Case((10 * block_size + 3, 3), block_size=block_size, replicas=replicas, next=k / block_size)
    assert case.layout.sends_offsets(case.next, "block")
    check_selection(case, case.next)
    check_rotate(case)


@settings(max_examples=examples(10))
@given(cases())
def test_a_skipped_step_writes_nothing(case: Case) -> None:
    check_skipped(case)


@settings(max_examples=examples(10))
@given(
    st.sampled_from(RULES),
    st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    st.sampled_from([0, 1]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
    st.sampled_from([None, 0.3]),
)
def test_an_elementwise_step_equals_pytorch(
    rule: str, sizes: list[int], offset: int, dtype: torch.dtype, seed: int, factor: float | None
) -> None:
    check_update(rule, sizes, offset, dtype, seed, "cpu", factor)


@settings(max_examples=examples(10))
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=4), st.sampled_from([0, 1]), st.integers(0, 99))
def test_the_steps_of_muon_equal_pytorch(sizes: list[int], offset: int, seed: int) -> None:
    check_muon(sizes, offset, seed, "cpu")


@settings(max_examples=examples(10))
@given(
    st.data(), st.lists(st.integers(1, 5000), min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_norms_identify_the_tensors(data: st.DataObject, sizes: list[int], dtype: torch.dtype) -> None:
    bad = {}
    for i, n in enumerate(sizes):
        if data.draw(st.booleans()):
            value = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
            bad[i] = (data.draw(st.integers(0, n - 1)), value)
    check_norms(sizes, bad, dtype, data.draw(st.sampled_from([0, 1])), "cpu")


@pytest.mark.parametrize("in_use, offset", [(0.1, 0), (0.1, 1), (0.5, 0), (1.0, 0)])
def test_values_of_owners_are_written_everywhere(in_use: float, offset: int) -> None:
    """Complete tiles with wide stores, and others; the same bits as PyTorch, on the mask and off it."""
    check_written(Case((8300, 90), (40,), 1024, 2, in_use=in_use, next=1.0, parameter_offset=offset))


def test_positions_after_the_end_of_a_tensor_are_ignored() -> None:
    """The last block of 32 entries receives a selection that was made in a block of 64, as in a dry run."""
    case = Case((160,), block_size=64, density=0.1, in_use=0.1, previous=0.1, next=0.1, replicas=2, replica=0)
    passes, masks = case.passes(triton_passes), (case.mask(0.1, 1), case.mask(0.1, 2))
    guarded = [torch.cat((case.draw(torch.float32, seed)[0], torch.full((64,), 7.0))) for seed in range(2)]
    parameters, gradients = ([tensor[:160]] for tensor in guarded)
    for _ in range(3):
        passes.bind(case.step(parameters, gradients, masks))
        own = pack_all(passes)
        assert own is not None and case.layout.sends_offsets(0.1, "block")
        squares_all(passes)
        update_all(passes)
        passes.release()
        passes.rotate(own.repeat(2), 0.1, masks[0].bits, masks[1].bits)
        gradients[0].copy_(torch.arange(160.0) % 64)  # the last entries of a block are selected
    passes.kept()
    assert all(bool((tensor[160:] == 7.0).all()) for tensor in guarded)


def test_a_mask_that_was_written_by_pytorch_is_listed_again() -> None:
    """As after loading: the lists of the last step are those of other masks."""
    case = Case((40, 300), block_size=16, density=0.3, in_use=0.3, previous=0.3, next=0.3)
    passes, mask, previous = case.passes(triton_passes), case.mask(0.3, 1), case.mask(0.3, 2)
    for seed in (3, 4):
        mask.bits.copy_(case.mask(0.3, seed).bits)
        gradients = case.draw(torch.float32, seed)
        expected = [g[used(case, mask, i)] * 0.1 for i, g in enumerate(gradients)]
        for state in passes.kept():
            state.zero_()
        passes.bind(case.step(case.draw(torch.float32, 0), gradients, (mask, previous)))
        pack_all(passes)
        assert torch.allclose(passes.payload, torch.cat(expected))
