"""State in host memory, and weights in BF16, with replicas as threads."""

import io
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from tests.marks import covering, slow
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import DENSE, SPARSE, copied, draw, flat, gradient, make_scape
from torchtitan_scape import Scape
from torchtitan_scape.core.bf16_weights import ScaledTensor, hold_in_bfloat16
from torchtitan_scape.core.parameters import stored
from torchtitan_scape.kernels.common.offload import BUFFERS, BlockingCopies, TripleBuffer
from torchtitan_scape.methods.scape.options import ScapeOptions

SHAPES = [(33, 5), (20, 15), *SPARSE, (15, 20), *[(12, 20)] * 3, *DENSE]


class Model(nn.Module):
    """The toy's tensors, with numbers that BF16 represents exactly."""

    def __init__(self, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.p = nn.ParameterList(t.bfloat16().float() for t in draw(0, shapes))


def run(
    collectives: ThreadCollectives | None, steps: int, bf16_weights: bool = False, probe: Any = None, **options: Any
) -> tuple[list[list[Tensor]], Scape, Model]:
    """Return the values after every step. The contents of the copy buffers are destroyed between steps."""
    model = Model()
    options = {"lr": 1e-2, "block_size": 16, "density": 0.1, **options}
    if bf16_weights:
        hold_in_bfloat16(model, scaled=True)
    optimizer = make_scape(model.named_parameters(), replicas=collectives, **options)
    replica, history = collectives.replica if collectives else 0, []
    for step in range(steps):
        for p, g in zip(model.parameters(), gradient(step, replica, SHAPES), strict=True):
            p.grad = g
        if step == 4 and replica == 0:
            model.p[0].grad[3, 2] = float("nan")
        optimizer.step()
        if (window := optimizer.method.passes.storage.window) is not None:
            window.finish()
            for buffer in window.buffers:
                buffer.fill_(float("nan"))
        history.append([p.detach() * 1.0 for p in model.parameters()])
        if probe:
            probe(optimizer, model, step)
    return history, optimizer, model


def kept(optimizer: Scape) -> dict[str, Tensor]:
    optimizer.finish_previous_step()
    return {f"{s.kind}.{name}": values.clone() for s in optimizer.method.states() for name, values in s.tensors.items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"density_warmup_steps": 5, "max_norm": None, "chunk_bytes": 64},
    {"code": "int8", "chunk_bytes": 128},
    {"selection": "tensor", "density_warmup_steps": 3},
    {"update": "sharded"},
    {"update": "sharded", "density_warmup_steps": 5, "bf16_weights": True},
    {"update": "sharded", "code": "int8", "bf16_weights": True},
    {"update": "sharded", "selection": "tensor", "bf16_weights": True, "density_warmup_steps": 3, "max_norm": None},
]


@pytest.mark.parametrize("replicas, options", covering(product((1, 2, 3, 4), OPTIONS)))
def test_offload_does_not_change_a_bit(replicas: int, options: dict[str, Any]) -> None:
    """Property 5: parameters, state and metrics are bitwise equal to those without offloading."""

    def work(collectives: ThreadCollectives) -> None:
        expected, resident, _ = run(collectives, 7, **options)
        got, optimizer, _ = run(collectives, 7, offload=["state"], **options)
        for step, (want, values) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(flat(want), flat(values)), step
        want_state, state = kept(resident), kept(optimizer)
        assert want_state.keys() == state.keys()
        assert all(torch.equal(want_state[k], state[k]) for k in state)
        assert optimizer.metrics() == resident.metrics()
        passes = optimizer.method.passes
        window = passes.storage.window
        assert resident.method.passes.storage.window is None and window is not None
        assert sum(b.numel() for b in window.buffers) <= BUFFERS * max(passes.sizes)
        assert len(window.sequence([(0, len(passes.sizes))])) >= 3, "buffers are used again"

    run_replicas(replicas, work)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
    st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_a_pass_visits_every_tensor_once(sizes: list[int], cuts: list[int], passes: list[bool]) -> None:
    """With any chunks. Written values are visible in the next pass, and finally in host memory."""
    spans, end = [], 0
    for n in sizes:
        spans.append((end, end + n))
        end += -(-n // 4) * 4
    window = TripleBuffer(spans, end, torch.device("cpu"))
    edges = sorted({0, len(sizes), *(c for c in cuts if c <= len(sizes))})
    parts = list(pairwise(edges))
    written = 0.0
    for changed in passes:
        seen: list[int] = []
        for part in parts:
            for first, last in window.walk(part, parts, changed):
                assert part[0] <= first < last <= part[1]
                for i in range(first, last):
                    assert bool((window.views[i] == written * (i + 1)).all())
                    window.views[i].fill_((written + 1) * (i + 1) if changed else float("nan"))
                seen += range(first, last)
        assert seen == list(range(len(sizes)))
        written += changed
    window.finish()
    assert all(bool((window.host[a:b] == written * (i + 1)).all()) for i, (a, b) in enumerate(spans))
    assert sum(b.numel() for b in window.buffers) <= BUFFERS * max(sizes)


class Lazy(BlockingCopies):
    """Two copy streams that are as late as possible: they copy only when an event is waited for.

    They raise if a copy would change a tensor that was received and may still be in use.
    """

    def __init__(self) -> None:
        self.fetches: list[tuple[Tensor, Tensor, int]] = []
        self.stores: list[tuple[Tensor, Tensor]] = []
        self.fetched, self.stored, self.in_use, self.together = 0, 0, list[Tensor](), 0

    def fetch(self, on_device: Tensor, on_host: Tensor, after: int) -> int:
        for one in self.in_use:
            begin, end = on_device.data_ptr(), on_device.data_ptr() + on_device.nbytes
            assert one.data_ptr() >= end or begin >= one.data_ptr() + one.nbytes, "the buffer may still be worked on"
        self.fetches.append((on_device, on_host, after))
        self.together += after < len(self.stores)
        return len(self.fetches)

    def store(self, on_host: Tensor, on_device: Tensor) -> None:
        self.stores.append((on_host, on_device))

    def released(self) -> int:
        self.in_use.clear()
        return len(self.stores)

    def main_waits(self, event: int) -> None:
        for on_device, on_host, after in self.fetches[self.fetched : event]:
            self._store_until(after)
            on_device.copy_(on_host)
        self.fetched = max(self.fetched, event)
        self.in_use.append(self.fetches[event - 1][0])

    def finish(self) -> None:
        for on_device, on_host, after in self.fetches[self.fetched :]:
            self._store_until(after)
            on_device.copy_(on_host)
        self.fetched = len(self.fetches)
        self._store_until(len(self.stores))

    def _store_until(self, count: int) -> None:
        for on_host, on_device in self.stores[self.stored : count]:
            on_host.copy_(on_device)
        self.stored = max(self.stored, count)


@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[-1]], ids=["replicated", "sharded"])
def test_no_pass_reads_a_tensor_before_its_copy(options: dict[str, Any]) -> None:
    expected, _, _ = run(None, 8, **options)

    def lazily(window: TripleBuffer, *arguments: Any) -> None:
        made(window, *arguments)
        window._side = Lazy()
        window._free = [0] * len(window.buffers)

    made = TripleBuffer.__init__
    with patch.object(TripleBuffer, "__init__", lazily):
        got, optimizer, _ = run(None, 8, offload=["state"], **options)
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(expected, got, strict=True))
    window = optimizer.method.passes.storage.window
    assert window is not None
    side: Any = window._side
    assert len(side.fetches) + len(side.stores) > 30
    # While a group is copied to the host, the next one may be copied to the device.
    assert side.together > len(side.stores) // 2, (side.together, len(side.stores))


def test_a_failed_step_leaves_no_pending_copies() -> None:
    """For example after running out of memory between two groups of tensors; the last state is then loaded again."""
    options: dict[str, Any] = {"offload": ["state"]}
    expected, _, _ = run(None, 6, **options)
    _, optimizer, model = run(None, 3, **options)
    saved = copied(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.parameters()]
    with patch.object(optimizer.method.passes, "carry", side_effect=RuntimeError), pytest.raises(RuntimeError):
        for p, g in zip(model.parameters(), gradient(50, 0, SHAPES), strict=True):
            p.grad = g
        optimizer.step()
    for p, value in zip(model.parameters(), weights, strict=True):
        p.data.copy_(value)
    optimizer.load_state_dict(saved)
    window = optimizer.method.passes.storage.window
    assert window is not None
    for buffer in window.buffers:
        buffer.fill_(float("nan"))
    for step in range(3, 6):
        for p, g in zip(model.parameters(), gradient(step, 0, SHAPES), strict=True):
            p.grad = g
        if step == 4:
            model.p[0].grad[3, 2] = float("nan")
        optimizer.step()
    assert torch.equal(flat([p.detach() for p in model.parameters()]), flat(expected[-1]))


def test_too_little_host_memory_is_refused() -> None:
    with patch("torchtitan_scape.kernels.common.offload.free_host_memory", lambda: 1000):
        for options in ({}, {"update": "sharded"}):
            with pytest.raises(ValueError, match=r"offload needs .* GB of host memory for this rank, and 0.00 GB are"):
                make_scape(Model().named_parameters(), lr=0.1, offload=["state"], **options)  # type: ignore[arg-type]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"offload = \['moment'\]; it may contain"):
        make_scape(Model().named_parameters(), lr=0.1, offload=["moment"])
    with pytest.raises(ValueError, match=r"weights_dtype = 'bfloat16'; .* set update = \"sharded\""):
        ScapeOptions(weights_dtype="bfloat16")
    model = Model()
    hold_in_bfloat16(model, scaled=False)
    with pytest.raises(ValueError, match="hold_in_bfloat16"):
        make_scape(model.named_parameters(), lr=0.1, update="sharded")
    with pytest.raises(ValueError, match=r"'q' is not stored in BF16, but other parameters are"):
        make_scape([*model.named_parameters(), ("q", nn.Parameter(torch.ones(3)))], lr=0.1, update="sharded")


# ------------------------------------------------------------------------------------ weights in BF16


@pytest.mark.parametrize("replicas, warmup", [slow(1, 0), (2, 5), slow(3, 0)])
def test_scaled_bf16_weights_follow_the_master_of_their_owner(replicas: int, warmup: int) -> None:
    """A weight differs from its master by one rounding to BF16, however long it was outside the mask.

    Weight decay is not lost, although one step of it is below BF16's resolution. Masters are bitwise equal to FP32
    weights.
    """
    rates: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1.0, "density": 0.02, "update": "sharded"}
    rates |= {"density_warmup_steps": warmup}
    steps = 20

    def work(collectives: ThreadCollectives) -> list[Tensor]:
        masters: list[dict[int, Tensor]] = []

        def probe(optimizer: Scape, model: Model, step: int) -> None:
            passes: Any = optimizer.method.passes
            own = passes.owner.cut([p.detach() * 1.0 for p in model.parameters()])
            masters.append({i: passes.owner.share_of(passes.owner.master, i).clone() for i in passes.owner.own})
            for i, master in masters[-1].items():
                error = (own[i] - master).abs()
                assert bool((error <= 2.0**-7.99 * master.abs() + 1e-30).all()), (step, i)

        narrow, optimizer, _ = run(collectives, steps, bf16_weights=True, probe=probe, **rates)
        run(collectives, steps, probe=lambda o, m, s: check(o.method.passes, m, masters[s]), **rates)
        assert float(optimizer.method.passes.owner.scales[0]) == pytest.approx((1 - 1e-3) ** (steps - 1))  # type: ignore[attr-defined]
        return [flat(values) for values in narrow]

    def check(passes: Any, model: Model, want: dict[int, Tensor]) -> None:
        own = passes.owner.cut([p.detach() for p in model.parameters()])
        assert all(torch.equal(own[i], master) for i, master in want.items())

    first, *others = run_replicas(replicas, work)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_small_scale_is_moved_into_the_stored_numbers() -> None:
    """By powers of two, so that values are equal to those of an unbounded scale."""

    def work(collectives: ThreadCollectives) -> tuple[list[list[Tensor]], Tensor]:
        options: dict[str, Any] = {"lr": 0.4, "weight_decay": 1.0, "update": "sharded", "max_norm": 0.1}
        history, optimizer, _ = run(collectives, 30, bf16_weights=True, **options)
        return history, optimizer.method.passes.owner.scales  # type: ignore[union-attr]

    (folded, scales), _ = run_replicas(2, work)
    with patch("torchtitan_scape.kernels.scape.step.MIN_WEIGHT_SCALE", 0.0):
        (plain, small), _ = run_replicas(2, work)
    assert float(small.max()) == pytest.approx(0.6**29) and float(scales.min()) > 2.0**-17
    for a, b in zip(folded, plain, strict=True):
        assert torch.equal(flat(a), flat(b))
    with pytest.raises(ValueError, match=r"lr \* weight_decay is 0\.6; with weights in BF16 it must be 0\.5 or less"):
        run(None, 1, bf16_weights=True, lr=0.6, weight_decay=1.0, update="sharded")


def test_another_optimizer_continues_with_the_bf16_weights() -> None:
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 1.0, "update": "sharded", "block_size": 16}
    _, optimizer, model = run(None, 6, bf16_weights=True, **options)
    before = [p.detach() * 1.0 for p in model.parameters()]
    again = make_scape(model.named_parameters(), **options)
    assert torch.equal(flat([p.detach() * 1.0 for p in model.parameters()]), flat(before))
    assert torch.equal(again.method.passes.owner.scales, optimizer.method.passes.owner.scales)  # type: ignore[attr-defined]
    owner: Any = again.method.passes.owner
    owner.start_master([stored(p) for p in model.parameters()])
    for i, value in enumerate(owner.cut([values.contiguous() for values in before])):
        torch.testing.assert_close(owner.share_of(owner.master, i), value)


@pytest.mark.parametrize(
    "options", [OPTIONS[3], OPTIONS[6], *map(slow, (OPTIONS[2], OPTIONS[4], OPTIONS[5], OPTIONS[7]))]
)
def test_state_dict_resumes_bitwise(options: dict[str, Any]) -> None:
    """Property 8, with other states offloaded in the resumed run.

    The model's checkpoint contains FP32 values, which are loaded first, as in the trainer.
    """
    options = {"density_warmup_steps": 2, **options}

    def work(collectives: ThreadCollectives) -> None:
        bf16_weights = options.get("bf16_weights", False)
        saved: dict[str, Any] = {}

        def save(optimizer: Scape, model: Model, step: int) -> None:
            if step == 5:
                saved.update(copied(optimizer.state_dict()))
                saved["model"] = {k: v.clone() for k, v in model.state_dict().items()}

        expected, one, _ = run(collectives, 9, probe=save, **options)
        model, more = Model(), {k: v for k, v in options.items() if k != "bf16_weights"}
        if bf16_weights:
            hold_in_bfloat16(model, scaled=True)
        for p in model.parameters():
            p.data.zero_()
        resumed = make_scape(
            model.named_parameters(),
            lr=1e-2,
            block_size=16,
            density=0.1,
            replicas=collectives,
            offload=["state"],
            **more,
        )
        model.load_state_dict(saved.pop("model"))
        resumed.load_state_dict(saved)
        for step in range(6, 9):
            for p, g in zip(model.parameters(), gradient(step, collectives.replica, SHAPES), strict=True):
                p.grad = g
            resumed.step()
            assert torch.equal(flat([p.detach() * 1.0 for p in model.parameters()]), flat(expected[step])), step
        want, got = kept(one), kept(resumed)
        assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)

    run_replicas(2, work)


def test_a_scaled_tensor_behaves_like_an_fp32_tensor() -> None:
    weight = torch.tensor([[1.0, -3.0], [2.5, 0.125]], dtype=torch.bfloat16)
    held = ScaledTensor(weight, torch.tensor(1.1, dtype=torch.float64))
    values = weight.float() * torch.tensor(1.1)
    assert held.dtype == torch.float32 and torch.equal(held * 1.0, values)
    assert torch.equal(held.values(torch.bfloat16), values.bfloat16())
    assert isinstance(held.t(), ScaledTensor) and torch.equal(held.t() @ torch.eye(2), values.t())
    assert torch.equal(held.view(-1)[1:3] + 0.0, values.view(-1)[1:3])
    held[0].copy_(torch.tensor([2.2, 4.4]))
    assert weight[0].tolist() == [2.0, 4.0] and weight[1].tolist() == [2.5, 0.125]
    held.copy_(ScaledTensor(weight.clone(), torch.tensor(1.1, dtype=torch.float64)))
    assert weight.tolist() == [[2.0, 4.0], [2.5, 0.125]], "its own values leave it as it is"
    held.mul_(2.0)
    assert weight.tolist() == [[4.0, 8.0], [5.0, 0.25]]
    torch._foreach_mul_([held], 2.0)
    assert weight.tolist() == [[8.0, 16.0], [10.0, 0.5]]
    torch.mul(torch.full((2, 2), 1.1), torch.full((2, 2), 3.0), out=held)
    assert weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    staged = StateDictStager(pin_memory=False, share_memory=False).stage({"p": held})["p"]
    weight.zero_()
    assert torch.equal(staged * 1.0, torch.full((2, 2), 3.0) * torch.tensor(1.1)), "as asynchronous checkpoints do"
    file = io.BytesIO()
    torch.save({"p": held}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["p"]
    assert type(loaded) is Tensor and torch.equal(loaded, held * 1.0)
    parameter = nn.Parameter(held)
    nn.functional.linear(torch.eye(2), parameter).sum().backward()
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
