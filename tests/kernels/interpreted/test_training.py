"""Several steps of SCAPE's optimizer in Triton's interpreter, against PyTorch; started like test_interpreted.py."""

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from tests.marks import ALL_EXAMPLES, slow
from tests.methods import test_replaced_storage
from tests.methods.scape import test_simulated
from tests.methods.scape.test_observed import Seen
from tests.replicas import run_replicas
from tests.toy import draw, flat, gradient, make_scape, train
from torchtitan_scape import Scape
from torchtitan_scape.kernels.common import launching

# A program takes a third of a second in the interpreter.
SHAPES: list[tuple[int, ...]] = [(7, 9), (20, 20), (7,)]
OFFLOAD = ["state"]

MORE_TRAINING: list[tuple[int, dict[str, Any]]] = [
    (2, dict(density=0.3, density_warmup_steps=2)),
    (2, dict(density=0.3, density_warmup_steps=2, offload=OFFLOAD)),
    (2, dict(density=0.3, update="sharded", density_warmup_steps=2, clip_mode="literal")),
    (2, dict(density=0.1, update="sharded", code="int8", bf16_weights=True)),
    # Complete tiles of aligned storage.
    (3, dict(density=0.1, update="sharded", shapes=[(40, 320), (9,)])),
]


def launch_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serialize launches, because the interpreter is not thread-safe."""
    lock, launch = threading.Lock(), launching.launch

    def one_at_a_time(*arguments: Any, **constants: Any) -> None:
        with lock:
            launch(*arguments, **constants)

    monkeypatch.setattr(launching, "launch", one_at_a_time)


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        slow(1, dict(density=0.1)),
        slow(2, dict(density=0.1, staleness_scaling=False, max_norm=None, clip_mode="literal")),
        (2, dict(density=0.3, update="sharded", density_warmup_steps=2, bf16_weights=True, offload=OFFLOAD)),
        *(slow(*case) for case in MORE_TRAINING),
    ],
)
def test_training_equals_pytorch(replicas: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of the optimizer, three in the default run; only the update rounds differently.

    The interpreter rounds to BF16 towards zero, so that the bound is tighter for master weights than for weights.
    """
    launch_one_at_a_time(monkeypatch)
    options = {"shapes": SHAPES, **options}
    masters: dict[str, list[Tensor]] = {"torch": [], "triton": []}
    shown: dict[str, list[Tensor]] = {"torch": [], "triton": []}

    def work(collectives: Any, kernels: str) -> list[list[Tensor]]:
        seen = Seen([f"p{i}" for i in range(len(options["shapes"]))])

        def probe(optimizer: Scape, step: int) -> None:
            optimizer.observe(seen)
            if collectives.replica == 0:
                shown[kernels] += seen.gradients.values()
            owner = optimizer.method.passes.owner
            if collectives.replica == 0 and owner is not None:
                masters[kernels].append(owner.master.clone())

        return train(collectives, 5 if ALL_EXAMPLES else 3, probe=probe, kernels=kernels, **options)

    twin, kernel = (run_replicas(replicas, lambda c, k=k: work(c, k)) for k in ("torch", "triton"))
    bound = 2.0**-7 if "bf16_weights" in options else 1e-6
    for ours, theirs in zip(twin[0], kernel[0], strict=True):
        assert (flat(ours) - flat(theirs)).norm() <= bound * flat(ours).norm()
    for our, their in zip(*masters.values(), strict=True):
        assert (our - their).norm() <= 1e-6 * our.norm()
    for our, their in zip(*shown.values(), strict=True):
        assert torch.equal(our.isnan(), their.isnan())
        assert (our.nan_to_num() - their.nan_to_num()).norm() <= bound * our.nan_to_num().norm()
    for other in kernel[1:]:
        assert torch.equal(flat(other[-1]), flat(kernel[0][-1]))


def test_owners_skip_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state changes in skipped steps: the second of four, in warm-up, and the last."""
    launch_one_at_a_time(monkeypatch)

    def work(collectives: Any) -> None:
        parameters = [torch.nn.Parameter(p) for p in draw(0, SHAPES)]
        options: dict[str, Any] = dict(density=0.1, density_warmup_steps=2, update="sharded", kernels="triton")
        options |= dict(lr=1e-2, block_size=16)
        optimizer = make_scape(parameters, replicas=collectives, **options)
        passes: Any = optimizer.method.passes
        for step in range(4):
            for p, g in zip(parameters, gradient(step, collectives.replica, SHAPES), strict=True):
                p.grad = g.clone()
            if step in (1, 3) and collectives.replica == 1:
                parameters[1].grad[3, 2] = float("nan")
            kept = [*parameters, passes.storage.flat, passes.owner.common, passes.owner.master]
            before = [t.detach().clone() for t in kept]
            optimizer.step()
            same = [torch.equal(a, b) for a, b in zip(before, kept, strict=True)]
            assert all(same) if step in (1, 3) else not any(same[1:2])

    run_replicas(2, work)


@pytest.mark.parametrize("how", ["read", slow("load")])
@pytest.mark.parametrize("code", ["float32", slow("int8")])
def test_moments_outside_the_state_are_those_of_pytorch(how: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the state between steps, or loading it into another optimizer, changes no bit of what follows.

    Steps 3 and 5 are skipped, the first and the third of the target density. Step 7 is dense.
    """
    launch_one_at_a_time(monkeypatch)

    def work(collectives: Any, kernels: str, how: str) -> tuple[list[Tensor], list[Tensor]]:
        options: dict[str, Any] = dict(lr=1e-2, block_size=16, density=0.3, density_warmup_steps=2, code=code)
        options |= dict(replicas=collectives, kernels=kernels)
        parameters = [torch.nn.Parameter(p) for p in draw(0, SHAPES)]
        optimizer, shown = make_scape(parameters, **options), list[Tensor]()
        for step in range(9):
            for p, g in zip(parameters, gradient(step, collectives.replica, SHAPES), strict=True):
                p.grad = g.clone()
            if step in (3, 5) and collectives.replica == 1:
                parameters[1].grad[3, 2] = float("nan")
            if step == 7:
                optimizer.request_full_exchange()
            optimizer.step()
            if how == "read":
                shown.append(torch.cat([t.clone() for t in optimizer.method.passes.kept()]))
            if how == "load":
                saved = optimizer.state_dict()
                optimizer = make_scape(parameters, **options)
                optimizer.load_state_dict(saved)
        optimizer.finish_previous_step()
        return [*(p.detach() for p in parameters), *optimizer.method.passes.kept()], shown

    (undisturbed, _), _ = run_replicas(2, lambda c: work(c, "triton", ""))
    (disturbed, shown), _ = run_replicas(2, lambda c: work(c, "triton", how))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(undisturbed, disturbed, strict=True))
    (_, expected), _ = run_replicas(2, lambda c: work(c, "torch", how))
    for ours, theirs in zip(shown, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [slow(dict(density=0.1, density_warmup_steps=2, code="int8"))],
)
def test_simulated_replicas_equal_real_ones(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of two replicas; the third is skipped because of a NaN of the second replica."""
    launch_one_at_a_time(monkeypatch)
    monkeypatch.setattr(test_simulated, "SHAPES", SHAPES)
    test_simulated.check_alike(2, 2, 4, kernels="triton", **options)


@pytest.mark.parametrize("tensor_rate", [False, True], ids=["number", "tensor"])
def test_changed_rates_and_addresses_are_used(tensor_rate: bool) -> None:
    """Tables are computed again for other learning rates, also if a tensor is changed in place, and other gradients."""

    def work(kernels: str) -> list[Tensor]:
        parameters = [torch.nn.Parameter(p) for p in draw(0, SHAPES)]
        rate = torch.tensor(1e-2) if tensor_rate else 1e-2
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        optimizer = make_scape(named, lr=rate, density=0.3, block_size=16, kernels=kernels)
        held: list[Any] = []  # so that the next gradients have other addresses
        for step in range(5):
            for p, g in zip(parameters, gradient(step, 0, SHAPES), strict=True):
                held.append(p.grad)
                p.grad = g.clone()
            if step == 3:
                optimizer.request_full_exchange()
            optimizer.step()
            group = optimizer.param_groups[0]
            if tensor_rate:
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5
        return [p.detach() for p in parameters]

    for ours, theirs in zip(work("triton"), work("torch"), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_new_storage_of_the_parameters_is_updated() -> None:
    test_replaced_storage.check_scape("triton")
