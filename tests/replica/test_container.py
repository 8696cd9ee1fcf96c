"""The optimizer around a method: the check of gradients, and skipped steps."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool
from torchtitan_scape import replicate
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.kernels.backends import finite_check
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.replica.guard import FiniteGuard, NonFiniteGradientError, gradient_check
from torchtitan_scape.topology.collectives import ReplicaCollectives


def whole_send_after_a_skipped_step(name: str) -> list[float]:
    """Return the residual norm before the request, after its skipped step, and after the next step."""
    from torchtitan_scape.optimizers.elementwise import AdamS
    from torchtitan_scape.replica.optimizer import ReplicaOptimizer
    from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives

    torch.manual_seed(0)
    model, entry = nn.Linear(40, 30), METHODS[name]
    options = {"start": 0} if name == "powersgd" else {}
    optimizers = ReplicaOptimizer(
        partial(AdamS, lr=1e-3),
        entry.options(**options),
        OneReplica(ReplicaCollectives(dist.group.WORLD)),
        model=model,
        max_norm=1.0,
        reduction="sum",
        total_steps=100,
        max_skipped_steps=5,
    )
    found = []
    for step in range(6):
        if step == 4:
            optimizers.request_full_exchange()
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        if step == 4 and dist.get_rank() == 1:
            assert model.weight.grad is not None
            model.weight.grad[0, 0] = torch.nan
        optimizers.step()
        found.append(optimizers.metrics()["residual_norm"])
    return found[3:]


@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_a_skipped_full_exchange_is_repeated(name: str, pool2: Pool) -> None:
    for before, skipped, after in pool2(whole_send_after_a_skipped_step, name):
        assert before > 0 and skipped == before and after == 0.0


@pytest.mark.parametrize("summed_over", ["", "all ranks"])
def test_a_non_finite_sum_is_not_attributed_to_one_rank(summed_over: str) -> None:
    """A rank sees only its shard of a sum over ranks, so that any of them may have caused the NaN."""
    everywhere = [(0, []), (1, ["parameter 'w'"])]
    collectives = ReplicaCollectives(None)
    collectives.gather_objects = lambda _: everywhere  # type: ignore[method-assign]
    guard = FiniteGuard(["w"], finite_check("torch"), collectives, PhaseTimer(torch.device("cpu")), 1)
    guard.summed_over = summed_over
    guard.check([torch.tensor([torch.nan])])
    guard.conclude(torch.tensor(torch.nan))
    with pytest.raises(NonFiniteGradientError, match="rank 1, parameter 'w'") as raised:
        guard.finish_previous_step()
    whose = "A rank has a part of the sum over all ranks, any of which may have made it. Parameters and"
    assert (whose in str(raised.value)) is bool(summed_over)
    assert str(raised.value).endswith(f"the data of {summed_over or 'that rank'}.")


@pytest.mark.parametrize("by_norms", [False, True])
def test_both_checks_of_gradients_agree(by_norms: bool) -> None:
    shards = collect_shards(
        torch.optim.SGD([nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(7))]).param_groups
    )
    for factor, bad, good in ((1.0, (torch.nan, torch.inf, -torch.inf), 3e38), (8.0, (2.0**125, -3e38), 2.0**124)):
        good = 1e15 if by_norms else good  # squares of a norm must be finite as well
        check = gradient_check("torch", shards, factor, by_norms)
        for value in (*bad, good):
            gradients = [torch.randn(15), torch.randn(7)]
            gradients[0][4] = value
            assert check(gradients).tolist() == [value == good, True]


@pytest.mark.parametrize("name", ["sparta", "diloco"])
def test_norms_of_the_check_clip_local_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are read once for both, and the logged norm is theirs."""
    model, calls, norm = nn.Linear(4, 3), [], torch._foreach_norm
    optimizer = replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), name, max_norm=0.5)
    monkeypatch.setattr(torch, "_foreach_norm", lambda *arguments: calls.append(len(arguments[0])) or norm(*arguments))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    optimizer.step()
    assert calls == [2] and optimizer.grad_norm.item() == pytest.approx(whole.item(), rel=1e-6)
    moved = torch.cat([(a - p.detach()).flatten() for a, p in zip(before, model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * min(0.5, whole.item()), rel=1e-4)
