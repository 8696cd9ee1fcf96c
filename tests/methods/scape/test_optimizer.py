"""Properties of the optimizer apart from its arithmetic: masks, bytes, skipped steps, and errors."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.literal import Literal
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import DENSE, SPARSE, draw, flat, gradient, lasting, make_scape, positions, train
from torchtitan_scape import Scape
from torchtitan_scape.kernels.scape.step import PassInputs
from torchtitan_scape.kernels.scape.torch_passes import TorchPasses
from torchtitan_scape.methods.scape.options import ScapeOptions


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([0.5, 0.1, 0.01]),
    st.sampled_from(["block", "tensor"]),
)
def test_masks_are_equal_on_all_replicas_with_known_nnz(
    shapes: list[tuple[int, int]], replicas: int, density: float, selection: str
) -> None:
    """Property 6 (nnz is known on the host) and 3 (masks and moments), for any shapes, including empty ones."""
    seen: dict[int, list[Any]] = {}

    def work(collectives: ThreadCollectives) -> None:
        def probe(optimizer: Scape, step: int) -> None:
            masks, layout = optimizer.method.masks, optimizer.method.passes.layout
            if step:
                for i, n in enumerate(layout.sizes):
                    indices = positions(optimizer, i)
                    assert indices.numel() == 0 or (indices.min() >= 0 and indices.max() < n)
            sparse = range(len(layout.sizes)) if step else []
            on_mask = [optimizer.method.passes.kept()[i][positions(optimizer, i)] for i in sparse]
            seen.setdefault(step, []).append((masks.in_use.bits.clone(), on_mask))

        train(collectives, 4, shapes, probe, density=density, selection=selection)

    run_replicas(replicas, work)
    for states in seen.values():
        for bits, moments in states[1:]:
            assert torch.equal(bits, states[0][0])
            assert all(torch.equal(a, b) for a, b in zip(moments, states[0][1], strict=True))


def test_a_step_has_one_payload_exchange_and_the_counted_bytes() -> None:
    """Property 7, first half: counted bytes equal the inputs of the collectives, and do not depend on the data."""

    def work(collectives: ThreadCollectives) -> tuple[dict[Any, int], dict[Any, int], Scape]:
        keep: list[Any] = []
        train(collectives, 1, density=0.1, probe=lambda o, s: keep.append(o))
        optimizer, before = keep[0], dict(collectives.ledger.input_bytes)
        calls = dict(collectives.ledger.calls)
        for p in (s.parameter for s in optimizer._shards):
            p.grad = torch.ones_like(p)
        optimizer.step()
        traffic = collectives.ledger
        return (
            {kind: n - before["replicate", level, kind] for (_, level, kind), n in traffic.input_bytes.items()},
            {kind: n - calls["replicate", level, kind] for (_, level, kind), n in traffic.calls.items()},
            optimizer,
        )

    for handed, calls, optimizer in run_replicas(2, work):
        assert calls == {"payload": 1, "mask": 1, "flag": 1}
        entries = sum(optimizer.method.passes.layout.nnz(i, 0.1, "block") for i in range(4)) + 8
        # Both are padded to 16 bytes. Blocks of 16, k = 2: offsets take 1 byte per block, the bitmap 2.
        assert handed["payload"] == math.ceil(entries / 4) * 16
        assert handed["mask"] == math.ceil(optimizer.method.passes.layout.run_blocks / 16) * 16
        assert optimizer.planned_bytes() == handed["payload"] + handed["mask"]


def test_large_payloads_are_packed_in_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 and the warm-up allocate no payload buffer; at the target density there is one of the payload's size."""
    places: list[tuple[bool, bool]] = []
    current: list[Any] = []
    step, bind = Scape.step, TorchPasses.bind

    def remember(self: Scape) -> Any:
        current[:] = [s.parameter.grad for s in self.method.ordered]
        return step(self)

    def spy(self: TorchPasses, step: PassInputs) -> None:
        bind(self, step)
        homes = [self.payload] * len(current) if self.compact else current
        pieces = zip(self.payloads, homes, strict=True)
        inside = all(p.untyped_storage().data_ptr() == h.untyped_storage().data_ptr() for p, h in pieces)
        places.append((self.compact, inside))

    monkeypatch.setattr(Scape, "step", remember)
    monkeypatch.setattr(TorchPasses, "bind", spy)
    train(None, 6, density=0.1, density_warmup_steps=4)
    # d(4) is the target: the mask of step 4 is the first one with this density.
    assert places == [(False, True)] * 3 + [(True, True)] * 3


@pytest.mark.parametrize("density", [0.1, 0.3])
def test_masks_of_many_blocks_are_selected_and_decoded_in_slices(
    density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than one pass handles; encoded offsets at density 0.1, a bitmap at 0.3."""
    whole = run_replicas(3, lambda c: train(c, 6, density=density))
    monkeypatch.setattr("torchtitan_scape.kernels.scape.torch_passes._ROWS", 8)
    parts = run_replicas(3, lambda c: train(c, 6, density=density))
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(flat(a[-1]), flat(b[-1]))


@pytest.mark.parametrize(
    "bad_step, warmup, code, update",
    [
        *product((0, 1, 3), (0, 6), ("float32", "int8", "int4"), ("replicated",)),
        *product((0, 2, 7), (4,), ("float32", "int8"), ("sharded",)),
    ],
)
def test_all_replicas_skip_a_non_finite_gradient(bad_step: int, warmup: int, code: str, update: str) -> None:
    """A NaN of one replica: no replica's parameters, state or masks change; later steps equal the reference."""
    options: dict[str, Any] = {"density": 0.1, "density_warmup_steps": warmup, "code": code, "update": update}

    def work(collectives: ThreadCollectives) -> list[Tensor]:
        parameters = [nn.Parameter(p) for p in draw(0, SPARSE + DENSE)]
        optimizer = make_scape(parameters, lr=1e-2, block_size=16, replicas=collectives, **options)
        for step in range(8):
            for p, g in zip(parameters, gradient(step, collectives.replica, SPARSE + DENSE), strict=True):
                p.grad = g
            if step == bad_step and collectives.replica == 1:
                parameters[1].grad[3, 2] = float("nan")
            before = [values.detach().clone() for values in (*parameters, *lasting(optimizer))]
            optimizer.step()
            if step == bad_step:
                assert all(map(torch.equal, (*parameters, *lasting(optimizer)), before))
                in_use = optimizer.method.masks.in_use.bits.clone()
                optimizer.finish_previous_step()
                assert torch.equal(optimizer.method.masks.in_use.bits, in_use)
        assert optimizer.guard.skipped == 1
        return [p.detach() for p in parameters]

    values = draw(0, SPARSE + DENSE)
    expected = Literal(values[: len(SPARSE)], values[len(SPARSE) :], 2, **options)
    for step in range(8):
        gradients = [gradient(step, r, SPARSE + DENSE) for r in range(2)]
        if step == bad_step:
            gradients[1][1][3, 2] = float("nan")
        expected.step(gradients)
    for result in run_replicas(2, work):
        assert (flat(result) - flat(expected.theta)).norm() <= (1e-6 if code == "float32" else 1e-5) * flat(
            result
        ).norm()


def test_a_missing_gradient_counts_as_zeros() -> None:
    """A replica that did not use a parameter still participates in every collective."""

    def work(collectives: ThreadCollectives, explicit: bool) -> Tensor:
        parameters = [nn.Parameter(p) for p in draw(0, SPARSE + DENSE)]
        optimizer = make_scape(parameters, lr=1e-2, block_size=16, replicas=collectives)
        for step in range(5):
            for p, g in zip(parameters, gradient(step, collectives.replica, SPARSE + DENSE), strict=True):
                p.grad = g
            if collectives.replica == 0:
                for i in (1, 4):
                    parameters[i].grad = torch.zeros_like(parameters[i]) if explicit else None
            optimizer.step()
        return flat([p.detach() for p in parameters])

    implicit = run_replicas(2, lambda c: work(c, False))
    assert torch.equal(implicit[0], run_replicas(2, lambda c: work(c, True))[0])
    assert torch.equal(implicit[0], implicit[1])


def test_parameter_groups_have_separate_hyperparameters() -> None:
    """lr = 0 without decay freezes one group, while the other is updated with its own betas."""
    frozen, trained = nn.Parameter(torch.ones(5, 8)), nn.Parameter(torch.ones(5, 8))
    groups = [
        {"params": [("frozen", frozen)], "lr": 0.0, "weight_decay": 0.0},
        {"params": [("trained", trained)], "betas": (0.5, 0.9)},
    ]
    optimizer = make_scape(groups, lr=0.1)
    for _ in range(3):
        frozen.grad, trained.grad = torch.ones(5, 8), torch.ones(5, 8)
        optimizer.step()
    assert torch.equal(frozen, torch.ones(5, 8))
    assert bool((trained < 1).any())


def test_a_skipped_step_does_not_change_the_metrics() -> None:
    """The residual is stored outside the mask that was in use when the state was written."""
    parameter = nn.Parameter(torch.ones(40, 40))
    optimizer = make_scape([("w", parameter)], lr=1e-2, block_size=16)
    for step in range(4):
        parameter.grad = gradient(step, 0, [(40, 40)])[0]
        optimizer.step()
    before = optimizer.metrics()
    parameter.grad = torch.full((40, 40), float("nan"))
    optimizer.step()
    assert optimizer.metrics()["residual_norm"] == before["residual_norm"]
    optimizer.finish_previous_step()
    assert optimizer.metrics()["residual_norm"] == before["residual_norm"]
    assert bool(optimizer.grad_norm.isnan()) and optimizer.guard.skipped == 1


def test_construction_broadcasts_the_weights_of_replica_0() -> None:
    def work(collectives: ThreadCollectives) -> Tensor:
        parameter = nn.Parameter(torch.full((4, 4), float(collectives.replica)))
        make_scape([parameter], lr=0.1, replicas=collectives)
        return parameter.detach()

    assert all(torch.equal(p, torch.zeros(4, 4)) for p in run_replicas(3, work))


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_single_replica_does_not_encode(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends nothing, so that there is no quantization error and no memory for it."""
    monkeypatch.setattr("torchtitan_scape.kernels.codec.reference.BlockCode.encode", None)
    options: dict[str, Any] = {"density": 0.1, "density_warmup_steps": 3, "update": update}
    seen: list[Scape] = []
    coded = train(None, 6, probe=lambda o, step: seen.append(o), code="int4", **options)
    assert torch.equal(flat(coded[-1]), flat(train(None, 6, **options)[-1]))
    assert seen[0].method.passes.code_residual.numel() == 0 and seen[0].planned_bytes() == 0
    assert not sum(seen[0].collectives.ledger.sent.values())


def test_bf16_parameters_and_a_closure_are_supported() -> None:
    parameter = nn.Parameter(torch.ones(6, 6, dtype=torch.bfloat16))
    optimizer = make_scape([parameter], lr=0.1, density=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter.float() ** 2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert parameter.dtype == torch.bfloat16


def test_a_non_contiguous_parameter_is_updated() -> None:
    base = torch.ones(4, 6).t()
    parameter = nn.Parameter(base)
    assert not parameter.is_contiguous()
    parameter.grad = torch.ones(6, 4)
    make_scape([parameter], lr=0.1, weight_decay=0.0).step()
    # The first step is lr * sign(g), hence equal for all entries.
    assert bool((parameter < 1).all()) and parameter.unique().numel() == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"density": float("nan")}, "density = nan"),
        ({"block_size": 12}, "block_size = 12"),
        ({"block_size": 65536}, "block_size = 65536"),
        ({"selection": "row"}, "selection = 'row'"),
        ({"update": "local"}, r"update = 'local'; it must be 'replicated' \| 'sharded'"),
        ({"max_norm": 0.0}, "max_norm is 0.0"),
        ({"clip_mode": "none"}, "clip_mode = 'none'"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (1.0, 0.9)}, "beta1 is 1.0"),
    ],
)
def test_invalid_options_raise_an_error_with_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scape([("w", nn.Parameter(torch.ones(2, 2)))], **{"lr": 0.1, **options})


def test_integer_parameters_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ValueError, match=r"'steps' has dtype torch.int32"):
        make_scape([("steps", parameter)], lr=0.1)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = make_scape(embedding.named_parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_a_step_keeps_no_reference_to_the_gradients() -> None:
    """Otherwise they would be in memory twice during the next backward pass."""
    parameter = nn.Parameter(torch.randn(64, 64))
    optimizer = make_scape([("p", parameter)], lr=1e-3, density=0.1)
    for _ in range(3):
        parameter.grad = torch.randn(64, 64)
        storage = StorageWeakRef(parameter.grad.untyped_storage())
        optimizer.step()
        optimizer.zero_grad()
        assert storage.expired()


def test_parameters_on_two_devices_are_refused() -> None:
    parameters = [("a", nn.Parameter(torch.ones(4))), ("b", nn.Parameter(torch.ones(4, device="meta")))]
    with pytest.raises(ValueError, match="parameter 'b' is on meta, 'a' on cpu"):
        make_scape(parameters, lr=1e-3)


@pytest.mark.parametrize(("shapes", "density"), [([(300,)], 0.1), ([(64, 64)], 0.9999)])
def test_a_mask_of_all_ones_is_never_encoded(shapes: list[tuple[int, ...]], density: float) -> None:
    """Regression: the first step was encoded if the target density selects as many entries as a dense step."""

    def work(collectives: Any) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(collectives.replica)
        named = [(f"p{i}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
        scape = Scape(named, lr=1e-3, options=ScapeOptions(density=density, code="int4"), replicas=collectives)
        lost = []
        for step in range(4):
            for _, parameter in named:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if step == 3:
                scape.request_full_exchange()
            scape.step()
            lost.append(
                scape.method.passes.code_residual.abs().max().item()
                if scape.method.passes.code_residual.numel()
                else 0.0
            )
        return lost[0], lost[2]

    for first, coded in run_replicas(2, work):
        assert first == 0 and coded > 0
