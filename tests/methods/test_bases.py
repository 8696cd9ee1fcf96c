"""Bases of equal variance for the gradients of Muon's matrices, and the precision of their products."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.quantized_update import bases
from torchtitan_scape.methods.quantized_update.bases import (
    FLOOR,
    MatrixBasis,
    cosine_rotation,
    inverse_root,
    rotated,
    tf32_products,
)
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions, has_basis, whitened_sides
from torchtitan_scape.planner.step import BF16_PER

# A square, a wide and a tall matrix of a block; the others have no basis.
SHAPES = {
    "embedding": (50, 24),
    "layers.0.wq": (24, 24),
    "layers.0.w1": (48, 24),
    "layers.1.w2": (24, 40),
    "norm": (24,),
}
APPLIED = torch.tensor(True)


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


def test_an_owner_computes_all_its_bases_before_the_first_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between broadcasts they waited for those of other owners: all matrices were computed one after the other."""
    order = []
    ranks = SimpleNamespace(replica=0, broadcast_from=lambda *_: order.append("broadcast"))
    shards = collect_shards([{"params": [nn.Parameter(torch.ones(4, 8)) for _ in range(4)]}])
    owners = {shard.name: number % 2 for number, shard in enumerate(shards)}
    whitening = bases.WhiteningBases(shards, owners, ranks, every=10)  # type: ignore[arg-type]
    computed = bases.inverse_root

    def recorded(moment: Tensor) -> Tensor:
        order.append("basis")
        return computed(moment)

    monkeypatch.setattr(bases, "inverse_root", recorded)
    whitening.change({shard.name: torch.ones(4, 8) for shard in shards}, APPLIED)
    assert order == ["basis"] * 2 + ["broadcast"] * 4


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
    basis, residual = MatrixBasis.of((24, 40), torch.device("cpu")), torch.zeros(24, 40)
    for n in range(1, 42):
        gradient = 1e-12 * gradients(n, 0)[3].view(24, 40) if n < 5 else torch.zeros(24, 40)
        if n % 10 == 1:
            basis.change([side.whitening() for side in basis.whitened], residual, APPLIED)
        received = basis.decode(basis.encode(gradient))
        basis.observe(received, APPLIED)
        assert received.isfinite().all() and received.abs().max() < 1e-6


@pytest.mark.parametrize("width", [3072, 8])
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("shape", [(24, 24), (48, 24), (24, 512)])
def test_a_basis_is_undone_before_and_after_an_update(
    shape: tuple[int, int], owned: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the rounding of FP32, although `forward` is in eight bits."""
    monkeypatch.setattr(bases, "WHITENED_TOGETHER", width)
    generator = torch.Generator().manual_seed(1)
    owner, basis = (MatrixBasis.of(shape, torch.device("cpu"), owned=on) for on in (True, owned))
    assert all(side.forward.dtype == torch.int8 and side.forward.shape[-1] <= width for side in basis.whitened)
    matrix, error = (ill_conditioned(shape, generator) for _ in range(2))
    held = basis.encode(error).contiguous()
    for _ in range(2):
        assert (basis.decode(basis.encode(matrix)) - matrix).norm() < 1e-4 * matrix.norm()
        assert (basis.decode(held) - error).norm() < 1e-4 * error.norm()
        owner.observe(matrix, APPLIED)
        basis.change([side.whitening() for side in owner.whitened], held, APPLIED)


def test_blocks_of_a_side_have_equal_variance_in_a_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their rows differ by a factor of ten."""
    monkeypatch.setattr(bases, "WHITENED_TOGETHER", 8)
    basis, generator = MatrixBasis.of((24, 480), torch.device("cpu")), torch.Generator().manual_seed(0)
    gradient = torch.randn(24, 480, generator=generator)
    gradient[:8] *= 10.0
    for _ in range(40):
        basis.observe(gradient, APPLIED)
    basis.change([side.whitening() for side in basis.whitened], torch.zeros(24, 480), APPLIED)
    sizes = basis.encode(gradient).view(3, 8, 480).square().mean((1, 2)).sqrt()
    assert sizes.max() < 1.2 * sizes.min()  # `FLOOR` makes the weak ones smaller


def test_vectors_rows_and_stacks_have_no_basis() -> None:
    assert has_basis((24, 24)) and not has_basis((24,)) and not has_basis((1, 24)) and not has_basis((4, 24, 24))
    assert whitened_sides((24, 24)) == (True, True)
    assert whitened_sides((48, 24)) == (False, True)
    assert whitened_sides((24, 40)) == (True, False)


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
    products, updates = QuantizedUpdateOptions().matrix_flops(model, 64)
    tf32, fp32 = BF16_PER["CUDA"]
    assert tf32 * products + fp32 * updates < 0.2 * fp32 * (products + updates)
