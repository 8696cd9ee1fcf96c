"""Values of param groups, such as the learning rate, after a resume of an own training loop."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedules

from tests.marks import slow
from tests.pool import Pool
from torchtitan_scape.checkpoint.state import group_values, restore_groups
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.elementwise import AdamS

STEPS = 3  # before and after the resume


def one_cycle(optimizer: Any) -> Any:
    """Changes betas as well, and keeps further values in the param groups."""
    return schedules.OneCycleLR(optimizer, [0.1, 0.03], total_steps=2 * STEPS + 1)


def chained(optimizer: Any) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.ExponentialLR(optimizer, 0.8)]
    return schedules.ChainedScheduler(parts, optimizer)


def sequential(optimizer: Any) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(optimizer, 5)]
    return schedules.SequentialLR(optimizer, parts, [2])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 2 * STEPS),
    "one_cycle": one_cycle,
    "chained": chained,
    "sequential": sequential,
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


def build(method: str, schedule: str, lr: float = 0.01) -> tuple[Any, Any, Any]:
    from torchtitan_scape import replicate

    torch.manual_seed(0)
    model, kind = nn.Linear(4, 4), AdamS if method == "scape" else AdamW
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": lr / 10, "weight_decay": 0.5 * lr}]
    optimizer = replicate(model, kind(groups, lr=lr), method, dist.group.WORLD, total_steps=2 * STEPS)
    return model, optimizer, SCHEDULES[schedule](optimizer)


def train(model: Any, optimizer: Any, scheduler: Any) -> list[Any]:
    """Return all values of the param groups in each of the next steps."""
    found = []
    for _ in range(STEPS):
        model(torch.ones(1, 4)).square().sum().backward()
        found.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*([1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
    return found


def differing(folder: str, method: str, into: str, schedule: str) -> str:
    """Return which values of the resumed run differ from those of the uninterrupted one; "" if none does."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    path = f"{folder}/{method}-{into}-{schedule}"
    model, optimizer, scheduler = build(method, schedule)
    train(model, optimizer, scheduler)
    dcp.save(checkpoint_states(model, optimizer) | {"scheduler": scheduler}, checkpoint_id=path)
    expected = train(model, optimizer, scheduler)
    model, optimizer, scheduler = build(into, schedule, lr=0.5)
    text = load_checkpoint(path, model, optimizer)
    dcp.load({"scheduler": scheduler}, checkpoint_id=path)
    found = train(model, optimizer, scheduler)
    wrong = [
        f"{key} {there[key]} -> {here[key]}"
        for step, other in zip(expected, found, strict=True)
        for there, here in zip(step, other, strict=True)
        for key in there.keys() & here.keys()
        if there[key] != here[key] and not (key == "weight_decay" and into == "scape" != method)  # another optimizer
    ]
    return "" if not wrong and "; param groups as they were saved (lr " in text else f"{method} {into} {wrong} {text}"


def resume_all(folder: str, cases: list[tuple[str, str, str]]) -> list[str]:
    return [text for case in cases if (text := differing(folder, *case))]


PAIRS = [*((method, method) for method in METHODS), ("sparta", "dense"), ("dense", "diloco"), ("dense", "scape")]
ALL = [(*pair, schedule) for pair in PAIRS for schedule in SCHEDULES]
ONE_EACH = [(*pair, schedule) for pair, schedule in zip(PAIRS, cycle(SCHEDULES), strict=False)]


@pytest.mark.parametrize("cases", [ONE_EACH, slow(ALL)], ids=["one_each", "all"])
def test_every_method_resumes_with_a_schedule(cases: list[tuple[str, str, str]], pool2: Pool, tmp_path: Path) -> None:
    """Methods that store no state of the optimizer by parameter continued with the first learning rate."""
    assert pool2(resume_all, str(tmp_path), cases, timeout=300) == [[], []]


@pytest.mark.parametrize("first", [True, False])
def test_param_groups_without_parameters(first: bool, tmp_path: Path) -> None:
    """PyTorch raised IndexError at the load."""
    from torchtitan_scape import checkpoint_states, load_checkpoint, replicate

    def built(lr: float) -> tuple[Any, Any]:
        model = nn.Linear(4, 4)
        groups = [{"params": [], "lr": 0.5}, {"params": list(model.parameters())}]
        return model, replicate(model, AdamW(groups if first else groups[::-1], lr=lr), "dense")

    model, optimizer = built(lr=0.01)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=str(tmp_path))
    resumed, loaded = built(lr=0.1)
    assert "state as it was saved" in load_checkpoint(str(tmp_path), resumed, loaded)
    full, empty = loaded.param_groups[::-1] if first else loaded.param_groups
    assert empty["params"] == [] and full["params"] == list(resumed.parameters()) and full["lr"] == 0.01
    for there, here in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(there, here)
        assert torch.equal(optimizer.state[there]["exp_avg"], loaded.state[here]["exp_avg"])


def restored(saved_by: torch.optim.Optimizer, loaded: torch.optim.Optimizer) -> str:
    saved = group_values(saved_by.param_groups, collect_shards(saved_by.param_groups))
    return restore_groups(loaded, collect_shards(loaded.param_groups), saved, type(saved_by).__name__)


def named(**shapes: int) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(size))) for name, size in shapes.items()]


def test_another_optimizer_receives_the_numbers_of_both() -> None:
    """Adam's flag `decoupled_weight_decay` would change AdamW's update, for example."""
    adam = torch.optim.Adam(named(a=2), lr=0.02, betas=(0.5, 0.6), maximize=True)
    schedules.StepLR(adam, 1)
    for other in (AdamW(named(a=2), lr=torch.tensor(1.0), capturable=True), SGD(named(a=2), lr=1.0, momentum=0.5)):
        lr = other.param_groups[0]["lr"]
        text = restored(adam, other)
        group = other.param_groups[0]
        assert group["initial_lr"] == 0.02 and not group["maximize"] and "maximize (of another optimizer)" in text
        if isinstance(other, AdamW):
            assert group["lr"] is lr and group["betas"] == (0.5, 0.6) and group["decoupled_weight_decay"]
            assert lr.item() == pytest.approx(0.02)
        else:
            assert group["lr"] == 0.02 and "betas" not in group
            assert "betas (of another optimizer)" in text and "momentum (not in the checkpoint)" in text


def test_weight_decay_of_another_optimizer_is_not_restored() -> None:
    """AdamW's decoupled decay became a strong L2 penalty in Adam."""
    text = "weight_decay (0.25 in the checkpoint, of another optimizer)"
    for saved_by, loaded in [(AdamW, Adam), (SGD, AdamS), (type("Own", (SGD,), {}), SGD)]:
        optimizer = loaded(named(a=2), lr=1.0, weight_decay=0.5)
        assert text in restored(saved_by(named(a=2), lr=0.1, weight_decay=0.25), optimizer)
        assert optimizer.param_groups[0]["weight_decay"] == 0.5 and optimizer.param_groups[0]["lr"] == 0.1


def test_groups_with_other_parameters() -> None:
    """One group continues two if these agree, and two continue one."""
    (a, b), (c, d) = named(a=2, b=3), named(a=2, b=3)
    two = AdamW([{"params": [a]}, {"params": [b], "weight_decay": 0.0}], lr=0.25, betas=(0.5, 0.9))
    one = AdamW([c, d], lr=1.0, weight_decay=0.5)
    assert restored(two, one) == (
        "param groups as they were saved (lr 0.25), except weight_decay (saved param groups differ in it)"
    )
    assert one.param_groups[0]["lr"] == 0.25 and one.param_groups[0]["weight_decay"] == 0.5
    assert restored(one, two) == "param groups as they were saved (lr 0.25)"
    assert [group["weight_decay"] for group in two.param_groups] == [0.5, 0.5]


def test_checkpoints_without_values() -> None:
    adamw = AdamW(named(a=2), lr=0.5)
    text = restore_groups(adamw, collect_shards(adamw.param_groups), {}, "AdamW")
    assert text == "param groups are this run's (lr 0.5), as the checkpoint has none"
