"""Gradients encoded in bases of equal variance: the bases, what is conserved, exact resume, and the cost."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.replicas import run_replicas as run_with_chunks
from torchtitan_scape import replicate
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.workloads import LocalModel, get_workload
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.options import share_of_dense
from torchtitan_scape.methods.quantized import whitening
from torchtitan_scape.methods.quantized.method import Quantized
from torchtitan_scape.methods.quantized.options import QuantizedOptions, has_basis, whitened_sides
from torchtitan_scape.methods.quantized.whitening import (
    FLOOR,
    MatrixBasis,
    cosine_rotation,
    inverse_root,
    rotated,
    tf32_products,
)
from torchtitan_scape.optimizers.cost import muon_flops
from torchtitan_scape.optimizers.muon import orthogonalized
from torchtitan_scape.planner.step import BF16_PER
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.dry_run import DryRunCollectives

# A square, a wide and a tall matrix of a block; the others have no basis.
SHAPES = {
    "embedding": (50, 24),
    "layers.0.wq": (24, 24),
    "layers.0.w1": (48, 24),
    "layers.1.w2": (24, 40),
    "norm": (24,),
}
APPLIED = torch.tensor(True)
run_replicas = functools.partial(run_with_chunks, chunk_entries=512)  # eight chunks


def make(collectives: ReplicaCollectives, **options: Any) -> Quantized:
    optimizer = torch.optim.SGD([(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()])
    shards = collect_shards(optimizer.param_groups)
    options = {"code": "2bit", "block": 32, "whiten_every": 3} | options
    return Quantized(MethodContext(shards, collectives, optimizer), QuantizedOptions(**options))


def ill_conditioned(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a gradient whose singular values fall by a factor of 1000, in directions that stay the same."""
    if len(shape) < 2:
        return torch.randn(shape, generator=generator)
    fixed = torch.Generator().manual_seed(shape[0])
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=fixed))[0] for n in shape)
    fall = torch.logspace(0, -3, min(shape))
    noise = torch.randn(len(fall), len(fall), generator=generator) * 0.3 + torch.eye(len(fall))
    return left[:, : len(fall)] @ (fall.sqrt()[:, None] * noise * fall.sqrt()) @ right[: len(fall)]


def gradients(step: int, replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [ill_conditioned(shape, generator).view(-1) for shape in SHAPES.values()]


def means(steps: int, **options: Any) -> Callable[[ReplicaCollectives], tuple[Quantized, list[list[Tensor]]]]:
    def run(collectives: ReplicaCollectives) -> tuple[Quantized, list[list[Tensor]]]:
        method = make(collectives, **options)
        found = []
        for n in range(1, steps + 1):
            own = gradients(n, collectives.replica)
            found.append([g.clone() for g in method.synchronize(own, StepInfo(n, APPLIED))])
        return method, found

    return run


def pending(method: Quantized) -> list[Tensor]:
    """Return the pending errors of all shards in the model's own basis, (n,)."""
    states = [state for state in method.states() if state.is_gradient]
    return [sum(method.pending_gradient(state, name) for state in states) for name in SHAPES]


def test_the_rotation_is_orthogonal_and_mixes_all_entries() -> None:
    for size, width in ((24, 24), (80, 80), (2560, 256), (514, 2), (7, 7)):
        rotation = cosine_rotation(size, torch.device("cpu"))
        assert rotation.shape == (width, width)
        assert (rotation @ rotation.T - torch.eye(width)).abs().max() < 1e-6
    assert cosine_rotation(80, torch.device("cpu")).abs().max() < 0.16


@pytest.mark.parametrize("size", [80, 514])
def test_a_rotation_of_blocks_is_the_block_diagonal_matrix(size: int) -> None:
    rotation = cosine_rotation(size, torch.device("cpu"))
    matrices = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
    whole = torch.block_diag(*[rotation] * (size // len(rotation)))
    torch.testing.assert_close(rotated(matrices), whole @ matrices, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e8])
def test_the_inverse_root_equals_that_of_the_eigenvalues(condition: float, blocks: int) -> None:
    """Of the block-diagonal matrix: a weak block has large entries."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(blocks):
        q = torch.linalg.qr(torch.randn(64 // blocks, 64 // blocks, dtype=torch.float64, generator=generator))[0]
        found.append(q)
    q = torch.block_diag(*found)
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 64, dtype=torch.float64)
    moment = (q * values) @ q.T * 5.0
    width = 64 // blocks
    each = torch.stack([moment[i : i + width, i : i + width] for i in range(0, 64, width)])
    inverse = torch.block_diag(*inverse_root(each.float()))
    floored = (values / values.norm() + FLOOR) / (1 + FLOOR)
    expected = (q * floored**-0.5) @ q.T
    assert (inverse - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("size", [0.0, 1e-15, 1e-13, 1e10])
def test_roots_of_tiny_and_huge_gradients_are_finite(size: float) -> None:
    gradient = size * torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    found = inverse_root((gradient @ gradient.T)[None])
    assert found.isfinite().all() and 1.0 <= found.norm() < 100.0


def test_gradients_that_stay_zero_end_in_zeros() -> None:
    method = make(DryRunCollectives(replicas=2), whiten_every=10)
    for n in range(1, 42):
        own = [1e-12 * g if n < 5 else torch.zeros_like(g) for g in gradients(n, 0)]
        found = method.synchronize(own, StepInfo(n, APPLIED))
    assert all(g.isfinite().all() and g.abs().max() < 1e-6 for g in found)


@pytest.mark.parametrize("width", [3072, 8])
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("shape", [(24, 24), (48, 24), (24, 512)])
def test_a_basis_is_undone_before_and_after_an_update(
    shape: tuple[int, int], owned: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the rounding of FP32, although `forward` is in eight bits."""
    monkeypatch.setattr(whitening, "WHITENED_TOGETHER", width)
    generator = torch.Generator().manual_seed(1)
    owner, basis = (MatrixBasis.of(shape, torch.device("cpu"), owned=on) for on in (True, owned))
    assert all(side.forward.dtype == torch.int8 and side.forward.shape[-1] <= width for side in basis.whitened)
    matrix, error = (ill_conditioned(shape, generator) for _ in range(2))
    held = basis.encode(error).contiguous()
    for _ in range(2):
        assert (basis.decode(basis.encode(matrix)) - matrix).norm() < 1e-4 * matrix.norm()
        assert (basis.decode(held) - error).norm() < 1e-4 * error.norm()
        owner.observe(matrix, APPLIED)
        basis.change([side.whitening() for side in owner.whitened], [held], APPLIED)


def test_blocks_of_a_side_have_equal_variance_in_a_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their rows differ by a factor of ten."""
    monkeypatch.setattr(whitening, "WHITENED_TOGETHER", 8)
    basis, generator = MatrixBasis.of((24, 480), torch.device("cpu")), torch.Generator().manual_seed(0)
    gradient = torch.randn(24, 480, generator=generator)
    gradient[:8] *= 10.0
    for _ in range(40):
        basis.observe(gradient, APPLIED)
    basis.change([side.whitening() for side in basis.whitened], [], APPLIED)
    sizes = basis.encode(gradient).view(3, 8, 480).square().mean((1, 2)).sqrt()
    assert sizes.max() < 1.2 * sizes.min()  # `FLOOR` makes the weak ones smaller


def test_embedding_output_and_vectors_have_no_basis() -> None:
    basis = next(state for state in make(DryRunCollectives(replicas=2)).states() if state.kind == "basis")
    with_basis = [name for name in SHAPES if any(key.startswith(f"{name}.") for key in basis.tensors)]
    assert with_basis == list(SHAPES)[1:4]
    assert not has_basis((24,)) and not has_basis((1, 24)) and not has_basis((4, 24, 24))
    assert whitened_sides((24, 24)) == (True, True)
    assert whitened_sides((48, 24)) == (False, True)
    assert whitened_sides((24, 40)) == (True, False)


@pytest.mark.parametrize(("replicas", "code"), [(2, "2bit"), (5, "1bit"), (4, "e2m1")])
def test_every_gradient_is_applied_or_pending(replicas: int, code: str) -> None:
    steps = 8  # two updates of the bases
    found = run_replicas(replicas, means(steps, code=code))
    for i in range(len(SHAPES)):
        given = sum(gradients(n, r)[i] for n in range(1, steps + 1) for r in range(replicas))
        applied = replicas * sum(step[i] for step in found[0][1])
        held = sum(pending(method)[i] for method, _ in found)
        assert (applied + held - given).norm() < 2e-3 * given.norm()


def test_replicas_receive_the_same_bits() -> None:
    found = run_replicas(3, means(5))
    for method, steps in found[1:]:
        for own, first in zip(steps, found[0][1], strict=True):
            assert all(map(torch.equal, own, first))
        bases = [next(s for s in m.states() if s.kind == "basis").tensors for m in (method, found[0][0])]
        assert all(torch.equal(value, bases[1][name]) for name, value in bases[0].items())


def test_weak_directions_of_the_momentum_keep_their_signal() -> None:
    """The orthogonalized mean of 20 steps is nearer to that of the exact means than without bases."""

    def distance(**options: Any) -> float:
        exact = [sum(gradients(n, r)[1] for r in range(2)) / 2 for n in range(11, 31)]
        coded = [step[1] for step in run_replicas(2, means(30, **options))[0][1][10:]]
        a, b = (orthogonalized(torch.stack(each).mean(0).view(24, 24)).float() for each in (exact, coded))
        return float((a - b).norm() / a.norm())

    assert distance() < 0.5 * distance(whiten_every=0)


def test_a_skipped_step_changes_no_state() -> None:
    def run(collectives: ReplicaCollectives) -> list[bool]:
        method = make(collectives)
        same = []
        for n in range(1, 9):
            applied = n not in (4, 6)  # 4 is an update of the bases
            own = gradients(n, collectives.replica)
            before = copy.deepcopy(method.state_dict())
            if not applied:
                own[1][0] = torch.nan
            method.synchronize(own, StepInfo(n, torch.tensor(applied)))
            if not applied:
                after = method.state_dict()
                same += [torch.equal(before[k][name], v) for k, kind in after.items() for name, v in kind.items()]
        return same

    for same in run_replicas(2, run):
        assert all(same)
        assert len(same) > 20


def test_resume_is_exact() -> None:
    def run(collectives: ReplicaCollectives) -> bool:
        whole, first, second = (make(collectives) for _ in range(3))
        for n in range(1, 11):
            part = first if n <= 5 else second
            if n == 6:
                second.load_state_dict(copy.deepcopy(first.state_dict()))
            results = [m.synchronize(gradients(n, collectives.replica), StepInfo(n, APPLIED)) for m in (whole, part)]
            if not all(map(torch.equal, *results)):
                return False
        return True

    assert all(run_replicas(2, run))


def test_a_single_replica_keeps_its_gradients() -> None:
    method, found = means(4)(DryRunCollectives(replicas=1))
    assert all(torch.equal(a, b) for n, step in enumerate(found, 1) for a, b in zip(step, gradients(n, 0), strict=True))
    assert [state.kind for state in method.states()] == ["residual"]


def test_a_full_exchange_leaves_nothing_pending() -> None:
    def run(collectives: ReplicaCollectives) -> float:
        method = make(collectives)
        for n in range(1, 6):
            method.synchronize(gradients(n, collectives.replica), StepInfo(n, APPLIED))
        before = method.metrics()["residual_norm"]
        method.request_full_exchange()
        method.synchronize([torch.zeros_like(g) for g in gradients(6, 0)], StepInfo(6, APPLIED))
        return before if method.metrics()["residual_norm"] == 0.0 else 0.0

    assert all(before > 0.1 for before in run_replicas(2, run))


def test_the_consistency_check_compares_the_bases() -> None:
    method = make(DryRunCollectives(replicas=2))
    kinds = {found.name: [kind for kind, _ in found.parts] for found in method.replicated_tensors()}
    assert {"basis.left.forward", "basis.left.backward", "basis.left.moment"} < set(kinds["layers.0.wq"])
    assert not [kind for kind in kinds["embedding"] if kind and kind.startswith("basis")]


def test_another_code_is_another_layout() -> None:
    layouts = [QuantizedOptions(code=code, whiten_every=3).layout() for code in ("2bit", "e2m1")]
    assert layouts[0] != layouts[1]
    assert QuantizedOptions(code="2bit").layout() == QuantizedOptions(code="e2m1").layout()


def test_overlap_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="overlap = True does not go with method 'quantized' and these options"):
        replicate(
            model,
            torch.optim.SGD(model.parameters()),
            QuantizedOptions(code="2bit", whiten_every=10),
            overlap=True,
        )


def test_the_planner_knows_memory_and_products() -> None:
    model = LocalModel(tuple(SHAPES), tuple(SHAPES.values()))
    method, _ = run_replicas(2, means(1))[0]
    basis = next(state for state in method.states() if state.kind == "basis")
    held = sum(t.numel() * t.element_size() for t in basis.tensors.values())
    cost = method.options
    assert cost.held_memory(model, 2)["bases"] == held
    assert cost.matrix_flops(model, 1) == (0.0, 0.0)

    method = make(DryRunCollectives(replicas=2))
    with FlopCounterMode(display=False) as counter:
        for n in range(2, 5):  # one of every three steps updates the bases
            method.synchronize(gradients(n, 0), StepInfo(n, APPLIED))
    counted = counter.get_total_flops() / 3
    # A change of the basis also decodes and encodes both pending errors, and rotates the two roots.
    assert sum(cost.matrix_flops(model, 2)) < counted < 1.4 * sum(cost.matrix_flops(model, 2))


def test_a_model_without_numbered_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.named_parameters())
    context = MethodContext(collect_shards(optimizer.param_groups), DryRunCollectives(replicas=2), optimizer)
    with pytest.raises(ValueError, match=r"whiten_every = 10 is for the matrices .* Muon .* by matrices="):
        Quantized(context, QuantizedOptions(code="2bit", whiten_every=10))


def test_the_figures_of_the_page_are_those_of_llama_1_8b() -> None:
    workload = get_workload("llama_1_8b")
    model, options = workload.local(1), QuantizedOptions(code="2bit", block=512, whiten_every=10)
    cost = options
    assert share_of_dense(options, model, 64) == pytest.approx(0.0645, abs=5e-5)
    assert cost.held_memory(model, 64)["bases"] / model.entries == pytest.approx(5.5, abs=0.05)
    assert sum(cost.matrix_flops(model, 64)) / muon_flops(model, 1) == pytest.approx(0.53, abs=0.01)


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_products_are_in_tf32_on_a_gpu_alone(device: str, before: str) -> None:
    """The precision of the user's own products is restored, also after an error."""
    products = torch.backends.cuda.matmul
    users = products.fp32_precision
    products.fp32_precision = before
    try:
        with pytest.raises(RuntimeError), tf32_products(torch.device(device)):
            assert products.fp32_precision == ("tf32" if device == "cuda" else before)
            raise RuntimeError
        assert products.fp32_precision == before
    finally:
        products.fp32_precision = users


def test_products_in_tf32_are_cheaper_than_those_in_fp32() -> None:
    """Bases cost the planner's optimizer less than a fifth of what FP32 products would, where the device has TF32."""
    model = get_workload("llama_1_8b").local(1)
    products, updates = QuantizedOptions(code="2bit", whiten_every=200).matrix_flops(model, 64)
    tf32, fp32 = BF16_PER["CUDA"]
    assert tf32 * products + fp32 * updates < 0.2 * fp32 * (products + updates)
