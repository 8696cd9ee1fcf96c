"""Checks of the Triton passes against the PyTorch passes: in the interpreter on a CPU, and on a GPU.

Passes that only move or compare values must be bitwise equal, including the computation of mt. The update must equal
the exact value within a bound on the rounding errors of its operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from scripts.scape_passes import pack_all, squares_all, update_all
from torchtitan_scape.kernels.backends import scape_passes
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask, Ownership
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.reference import KEPT_MOMENT, MAX_STALENESS, MIN_VISIT_RATE
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadPlan, ShardedUpdate

Make = Callable[..., ScapePasses]
torch_passes, triton_passes = partial(scape_passes, "torch"), partial(scape_passes, "triton")
ULP = 2.0**-22  # error bound of a division on a GPU, two units in the last place; more than four roundings to nearest


@dataclass(frozen=True)
class Case:
    sparse: tuple[int, ...]
    whole: tuple[int, ...] = ()
    block_size: int = 16
    replicas: int = 1
    replica: int | None = None
    density: float = 0.1  # target density
    in_use: float = 0.1
    previous: float = 0.1
    next: float = 0.1
    beta1: float = 0.9
    scale: float = 1.0
    clip_moment: bool = True
    writes: bool = True
    gradient_dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    offset: int = 0  # entries by which the gradients' storage is misaligned
    parameter_offset: int = 0
    seed: int = 0
    chunk_entries: int = 0
    chunk_multiple: int = 1
    keeps_code_error: bool = False  # the last step left quantization errors
    columns: tuple[int, ...] | None = None  # row lengths for staleness; None for no scaling
    values: tuple[float, ...] = ()  # gradients are drawn from these, if given
    device: str = "cpu"
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        rates = Rates(1e-2, self.beta1, 0.95, 1e-8, 0.1, self.scale)
        object.__setattr__(self, "rates", rates)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.sparse, self.block_size, self.replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.sparse + self.whole

    def passes(self, make: Make) -> ScapePasses:
        plan = PayloadPlan(
            "block",
            self.density,
            self.replica,
            self.chunk_entries,
            self.chunk_multiple,
            keeps_code_error=self.keeps_code_error,
        )
        device = torch.device(self.device)
        passes = make(self.layout, self.whole, plan, device, writes=self.writes, columns=self.columns)
        generator = torch.Generator().manual_seed(self.seed + 1)
        for state in passes.states:
            state.copy_(torch.randn(state.numel(), generator=generator))
        passes.code_residual.copy_(torch.randn(passes.code_residual.numel(), generator=generator) * 1e-3)
        return passes

    def step(
        self, parameters: list[Tensor], gradients: list[Tensor], masks: tuple[Mask, Mask], **scalars: Any
    ) -> PassInputs:
        """Return the inputs of a step. By default it is applied, with a clip factor of 1; `scalars` override this."""
        fields = {
            "next_density": self.next,
            "applied": torch.tensor(True, device=self.device),
            "steps": torch.tensor(3.0, dtype=torch.float64, device=self.device),
            "clip": torch.ones((), device=self.device),
            "clip_moment": self.clip_moment,
            "rates": [self.rates] * len(parameters),
            "in_use": masks[0],
            "previous": masks[1],
        }
        return PassInputs(parameters, gradients, **{**fields, **scalars})

    def mask(self, density: float, seed: int) -> Mask:
        """Return a mask of this density that was selected from random values."""
        bits = torch.zeros(-(-self.layout.mask_bytes() // 4) * 4, dtype=torch.uint8)[: self.layout.mask_bytes()]
        if density < 1.0 and bits.numel():
            plan = PayloadPlan("block", 1.0, None)
            twin = torch_passes(self.layout, (), plan, torch.device("cpu"))
            generator = torch.Generator().manual_seed(seed)
            gradients = [torch.randn(n, generator=generator) for n in self.sparse]
            dense = Mask(bits.clone())
            case = replace(self, device="cpu", next=density)
            twin.bind(case.step([torch.zeros(n) for n in self.sparse], gradients, (dense, dense)))
            twin.rotate(pack_all(twin), density, bits, dense.bits)
        padded = torch.zeros(-(-bits.numel() // 4) * 4, dtype=torch.uint8, device=self.device)
        return Mask(padded[: bits.numel()].copy_(bits), density)

    def draw(self, dtype: torch.dtype, seed: int, values: tuple[float, ...] = (), offset: int = 0) -> list[Tensor]:
        """Draw flat tensors of the case's sizes, misaligned by `offset` entries."""
        generator = torch.Generator().manual_seed(seed)
        tensors = []
        for n in self.sizes:
            if values:
                drawn = torch.tensor(values)[torch.randint(len(values), (n,), generator=generator)]
            else:
                drawn = torch.randn(n, generator=generator)
            storage = torch.zeros(n + offset, dtype=dtype, device=self.device)
            tensors.append(storage[offset:].copy_(drawn))
        return tensors


def used(case: Case, mask: Mask, tensor: int) -> Tensor:
    """Return bool (n,): true for a tensor's entries in a mask."""
    n = case.sizes[tensor]
    bits = case.layout.bits(mask, tensor) if tensor < len(case.sparse) else None
    return torch.ones(n, dtype=torch.bool, device=case.device) if bits is None else reference.unpack_bits(bits, n)


def check_messages(ours: Tensor | None, theirs: Tensor | None) -> None:
    """Assert that both selections have the same bytes."""
    assert (ours is None) == (theirs is None)
    assert ours is None or theirs is None or torch.equal(ours, theirs), "selection"


def check_step(case: Case) -> None:
    """Run one step of both backends and compare payload, selection, norm and update."""
    masks = case.mask(case.in_use, case.seed + 2), case.mask(case.previous, case.seed + 3)
    twin: Any = case.passes(torch_passes)
    kernel = case.passes(triton_passes)
    gradients = [case.draw(case.gradient_dtype, case.seed + 4, case.values, case.offset) for _ in range(2)]
    parameters = [case.draw(case.parameter_dtype, case.seed + 5, (), case.parameter_offset) for _ in range(2)]
    before = [p.clone() for p in parameters[0]]
    messages = []
    clip = torch.tensor(0.7, device=case.device)
    for passes, own_gradients, own_parameters in zip((twin, kernel), gradients, parameters, strict=True):
        passes.bind(case.step(own_parameters, own_gradients, masks, clip=clip))
        messages.append(pack_all(passes))
    assert twin.compact == kernel.compact and twin.parts == kernel.parts
    for part in twin.parts if twin.compact else ():
        assert (part.stop - part.start) % case.chunk_multiple == 0

    # Pack: payload, last moment, residual.
    payloads, lasts = [], []
    for i, (start, count) in enumerate(zip(twin.payload_layout.positions, twin.counts, strict=True)):
        on = used(case, masks[0], i)
        assert torch.equal(kernel.states[i], twin.states[i]), "state"
        if twin.compact:
            payload, last = kernel.payload[start : start + count], kernel.moment_on_mask[start : start + count]
            assert torch.equal(last, twin.moment_on_mask[start : start + count]), "last moment"
        else:
            payload, last = kernel.gradients[i][on], kernel.states[i][on]
        assert torch.equal(payload, twin.payloads[i]), "payload"
        payloads.append(payload.clone())
        lasts.append(last.clone())

    check_messages(*messages)

    # A payload without buffer is copied to and from chunks.
    if not kernel.compact and not masks[0].dense:
        total = torch.cat(payloads)
        for factor, cuts in ((1, sorted({0, total.numel()})), (2, uneven_cuts(twin.counts))):
            for first, end in pairwise(cuts):
                chunk = torch.full((end - first,), float("nan"), device=case.device)
                kernel.pieces().fill(chunk, first)
                assert torch.equal(chunk, total[first:end])
                kernel.pieces().store(chunk * factor, first)
        stored = [kernel.gradients[i][used(case, masks[0], i)] for i in range(len(case.sizes))]
        assert torch.equal(torch.cat(stored), total * 2)
        for i, payload in enumerate(payloads):
            kernel.gradients[i][used(case, masks[0], i)] = payload

    check_update(case, kernel, masks, payloads, lasts, before, parameters[1])


def uneven_cuts(counts: Sequence[int], short: int = 7, long: int = 4999) -> list[int]:
    """Return the ends of the chunks of a payload, from 0 to its end; counts: entries of each tensor.

    Near the borders of tensors chunks have `short` entries; elsewhere they alternate with `long` ones, which exceed a
    tile. Most ends are inside a block and a tile, and a payload of some hundred entries has short chunks only.
    """
    borders = [0, *accumulate(counts)]
    cuts, length = [0], long
    while (at := cuts[-1]) < borders[-1]:
        near = any(abs(at - border) <= 6 * short for border in borders)
        length = short if near or length > short else long
        distance = min(border - at for border in borders if border > at)
        if length == long:
            length = max(short, min(long, distance - 6 * short))
        cuts.append(min(at + length, borders[-1]))
    return cuts


def check_update(
    case: Case,
    kernel: ScapePasses,
    masks: tuple[Mask, Mask],
    payloads: list[Tensor],
    lasts: list[Tensor],
    before: list[Tensor],
    parameters: list[Tensor],
) -> None:
    """Compare norm and update with the exact values, within the rounding errors of all operations."""
    r, clip = case.rates, 0.7
    b1, b2 = r.beta1, r.beta2
    residuals = [s.clone() for s in kernel.states]
    squares = squares_all(kernel)
    update_all(kernel)
    exact_squares, error_squares = 0.0, 0.0
    for i, (b, q) in enumerate(zip(payloads, lasts, strict=True)):
        on, held = used(case, masks[0], i), used(case, masks[1], i)
        n, fresh = case.sizes[i], on & ~held
        b, q, theta = b.double(), q.double(), before[i].double()
        gh = (b - b1 * q) / (1 - b1)
        gh_error = 3 * ULP * (b.abs() + b1 * q.abs()) / (1 - b1)
        exact_squares += float(gh.square().sum())
        error_squares += float((2 * gh.abs() * gh_error + gh_error.square() + 16 * ULP * gh.square()).sum())
        clipped, clipped_error = gh * clip, gh_error * clip + 2 * ULP * gh.abs()
        first, first_error = (clipped, clipped_error) if case.clip_moment else (gh, gh_error)
        m = b1 * q + (1 - b1) * first
        m_error = (1 - b1) * first_error + 3 * ULP * (b1 * q.abs() + (1 - b1) * first.abs())
        v = b2 * q.square() + (1 - b2) * clipped.square()
        v_error = (1 - b2) * (2 * clipped.abs() * clipped_error + clipped_error.square()) + 5 * ULP * v
        root = (v / (1 - b2**3)).sqrt()
        # sqrt(v + e) is within sqrt(e) of sqrt(v), and within e / (2 sqrt(v)) to first order.
        root_error = torch.minimum((v_error / (1 - b2**3)).sqrt(), v_error / (1 - b2**3) / root.clamp(min=1e-30))
        normalizer, error = root + r.eps, root_error + 4 * ULP * (root + r.eps)
        u = m / (1 - b1**3) / normalizer
        u_error = m_error / (1 - b1**3) / (normalizer - error).clamp(min=1e-30) + u.abs() * (
            error / normalizer + 6 * ULP
        )
        if case.columns is not None and not masks[0].dense and not masks[1].dense and bool(fresh.any()):
            mean = min(max((n - int(on.sum())) / int(fresh.sum()), 1.0), MAX_STALENESS)
            entering = fresh.view(-1, case.columns[i]).double()
            frequency = entering.mean(1, keepdim=True) * entering.mean(0) / entering.mean().square()
            factor = (mean / frequency.flatten()[on].clamp(min=MIN_VISIT_RATE)).clamp(1.0, MAX_STALENESS)
            u, u_error = (
                torch.where(fresh[on], u * factor, u),
                torch.where(fresh[on], (u_error + 16 * ULP * u.abs()) * factor, u_error),
            )
            m = torch.where(fresh[on], m * KEPT_MOMENT, m)
        expected = theta - r.lr * r.weight_decay * theta
        bound = 3 * ULP * theta.abs()
        expected[on] -= r.lr * u
        bound[on] += r.lr * u_error + 2 * ULP * (r.lr * u.abs())
        # A BF16 parameter is rounded when it has decayed, and once more on A; the interpreter truncates.
        if case.parameter_dtype == torch.bfloat16:
            bound += 2.0**-7 * (theta.abs() + expected.abs())
        if case.writes:
            assert bool(((parameters[i].double() - expected).abs() <= bound + 1e-30).all()), "parameter"
        else:
            assert torch.equal(parameters[i], before[i]), "another replica's parameter"
        state = kernel.kept()[i]
        assert torch.equal(state[~on], residuals[i][~on]), "residual"
        assert bool(((state[on].double() - m).abs() <= m_error + 1e-30).all()), "moment"
    assert abs(float(squares) - exact_squares) <= error_squares + 1e-30


def check_skipped(case: Case) -> None:
    """Assert that a step that is not applied changes no state."""
    masks = case.mask(case.in_use, case.seed + 2), case.mask(case.previous, case.seed + 3)
    kernel = case.passes(triton_passes)
    parameters = case.draw(case.parameter_dtype, case.seed + 5)
    persistent = [kernel.storage.flat, *parameters, masks[0].bits, masks[1].bits]
    persistent += [kernel.visits.rates] if kernel.visits else []
    before = [t.clone() for t in persistent]
    gradients = [torch.full_like(g, float("nan")) for g in case.draw(case.gradient_dtype, 0)]
    kernel.bind(
        case.step(
            parameters,
            gradients,
            masks,
            applied=torch.tensor(False, device=case.device),
            steps=torch.zeros((), dtype=torch.float64, device=case.device),
            clip=torch.tensor(float("nan"), device=case.device),
        )
    )
    pack_all(kernel)
    squares_all(kernel)
    update_all(kernel)
    for old, new in zip(before, persistent, strict=True):
        assert torch.equal(old, new)


def check_entering(case: Case) -> None:
    """Compare the counts of newly entered entries of both backends with a direct count."""
    masks = case.mask(case.in_use, case.seed + 2), case.mask(case.previous, case.seed + 3)
    counts = []
    for kind in (torch_passes, triton_passes):
        passes = case.passes(kind)
        step = case.step(case.draw(torch.float32, 1), case.draw(torch.float32, 2), masks, next_density=1.0)
        passes.bind(step)
        assert passes.visits is not None
        passes.count_entering(passes.visits)
        counts.append(passes.visits.counts)
    assert case.columns is not None
    fresh = [used(case, masks[0], i) & ~used(case, masks[1], i) for i in range(len(case.sparse))]
    tables = [each.view(-1, columns) for each, columns in zip(fresh, case.columns, strict=True)]
    expected = torch.cat([table.sum(axis) for table in tables for axis in (1, 0)])
    for each in counts:
        assert torch.equal(each, expected.int())


def check_rotate(case: Case) -> None:
    """Assert that the received selections become the current mask, in both encodings and both backends."""
    twin = case.passes(torch_passes)
    dense, gradients = Mask(torch.zeros(0)), case.draw(torch.float32, case.seed, case.values)
    twin.bind(case.step([torch.zeros_like(g) for g in gradients], gradients, (dense, dense)))
    message = pack_all(twin)
    results = []
    for passes in (twin, case.passes(triton_passes)):
        in_use, previous = case.mask(case.in_use, 1), case.mask(case.previous, 2)
        passes.rotate(message, case.next, in_use.bits, previous.bits)
        results.append((in_use.bits, previous.bits))
    # The padding after the last block is undefined.
    real = case.layout.total_blocks * case.block_size // 8
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours[:real], theirs[:real])


def check_written(case: Case) -> None:
    """Compare the parameters after all owners' new values were written, bit by bit."""
    ownership = Ownership.of(case.layout, case.whole)
    generator = torch.Generator().manual_seed(case.seed)
    sizes = [piece.end - piece.start for piece in ownership.pieces]
    values = [torch.randn(n, generator=generator).to(case.device) for n in sizes]
    mask, results = case.mask(case.in_use, case.seed + 2), []
    for make in (torch_passes, triton_passes):
        device = torch.device(case.device)
        owner = ShardedUpdate(ownership, 0, device)
        passes: Any = make(case.layout, case.whole, PayloadPlan("block", case.density, 0), device, owner=owner)
        parameters, gradients = (
            case.draw(torch.float32, case.seed + 5, (), case.parameter_offset),
            case.draw(torch.float32, 1),
        )
        passes.bind(case.step(parameters, gradients, (mask, mask), rates=[case.rates] * len(sizes)))
        for i, x in enumerate(values):
            bits = ownership.layout.bits(mask, i) if i < len(ownership.sparse) else None
            on = torch.ones_like(x, dtype=torch.bool) if bits is None else reference.unpack_bits(bits, x.numel())
            if passes.compact:
                passes.payload[passes.payload_layout.positions[i] :][: passes.counts[i]] = x[on]
            elif make is triton_passes:
                owner.cut(passes.gradients)[i].copy_(x)
            else:
                passes.payloads[i].copy_(x[on])
        passes.write()
        results.append(parameters)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
