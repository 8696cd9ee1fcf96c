"""Mistakes in training loops around `replicate`: calls of some ranks only, and calls that are left in or out."""

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.logs import logged
from tests.pool import Pool
from tests.replica.own_loop import batch, loss_of, make_model, make_optimizer, shard, through_a_file, train, weights
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.elementwise import AdamS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.replica import checks
from torchtitan_scape.replica.replicate import replicate


def caught(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------- calls of some ranks only


def called_alone(methods: list[str]) -> list[str]:
    """Let rank 0 alone read the figures and save. Return what is wrong on this rank; the run goes on."""
    wrong, alone = [], dist.get_rank() == 0
    for method in methods:
        ends = []
        for disturbed in (False, True):
            model = make_model()
            optimizer = make_optimizer(model, method)
            train(model, optimizer, range(5))
            if disturbed and alone:
                checks.WAIT_SECONDS = 0.2
                if optimizer.stats().keys() < {"grad_norm", "sent_bytes", "density", "clip_factor"}:
                    wrong.append(f"{method}: {optimizer.stats()}")
                text = caught(optimizer.state_dict)
                if ("state_dict() was called on 1 of 2 ranks" in text) == (method == "dense"):
                    wrong.append(f"{method}: {text!r}")
            train(model, optimizer, range(5, 8))
            optimizer.finish_previous_step()
            ends.append(weights(model))
        if not torch.equal(*ends):
            wrong.append(f"{method}: weights differ")
        checks.WAIT_SECONDS = 20.0
        optimizer.state_dict()
        if alone:
            time.sleep(0.05)  # the first rank may come late
        optimizer.state_dict()
    return wrong


def test_the_first_rank_alone(pool2: Pool) -> None:
    """`stats` is local; a state that would not be enough for a resume is noticed at the save."""
    assert pool2(called_alone, list(METHODS)) == [[], []]


def other_files() -> dict[str, str]:
    """Load states of other ranks and of other settings. Return the messages."""
    rank = dist.get_rank()

    def results(method: str) -> dict[str, str]:
        found = {}
        model = make_model()
        optimizer = make_optimizer(model, method)
        train(model, optimizer, range(4))
        states: list[Any] = [None, None]
        dist.all_gather_object(states, through_a_file([optimizer.state_dict(), model.state_dict()]))
        train(model, optimizer, range(4, 6))
        again = make_model(seed=7)
        resumed = make_optimizer(again, method, max_norm=0.5)
        again.load_state_dict(states[0][1])
        found[method] = caught(lambda: resumed.load_state_dict(states[0][0]))
        found[f"{method} own"] = caught(lambda: resumed.load_state_dict(states[rank][0]))
        object.__setattr__(resumed.methods[0].context, "max_norm", 1.0)
        train(again, resumed, range(4, 6))
        found[f"{method} equal"] = str(torch.equal(weights(model), weights(again)))
        states[rank][0]["replica"]["layout"]["replicas"] = 3
        found[f"{method} replicas"] = caught(lambda: resumed.load_state_dict(states[rank][0]))
        return found

    return results("dense") | results("topk")


def test_files_of_other_ranks(pool2: Pool) -> None:
    """One file is enough for `dense`; another `max_norm` does not matter; the advice about others works."""
    for found in pool2(other_files):
        assert found["dense"] == found["dense own"] == found["topk own"] == found["dense replicas"] == ""
        assert found["dense equal"] == found["topk equal"] == "True"
        assert "has replica=0, this run has 1; ranks differ, so every rank has to load the file" in found["topk"]
        assert "replicas=3, this run has 2" in found["topk replicas"] and "checkpoint_states(" in found["topk replicas"]


def shard_of_another_rank() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = shard(make_model(), mesh["shard"])
    optimizer = replicate(model, torch.optim.AdamW(model.parameters()), "dense")
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    state["replica"]["layout"]["shard"] = 0  # as in the file of rank 0
    return caught(lambda: optimizer.load_state_dict(state))


def test_a_file_has_one_shard(pool2: Pool) -> None:
    for text in pool2(shard_of_another_rank):
        assert "has shard=0, this run has 1" in text


# ------------------------------------------------------------------------------- calls left in or left out


RIGHT = ("right", "zeroed", "data zeroed", "set to none", "closure", "second gradient", "flushed")


def warned(loop: str) -> str:
    """Return the warnings of a loop of three steps, most with a mistake. The last parameter may be unused."""
    model = make_model()
    model.unused = nn.Parameter(torch.ones(3)) if loop.startswith("unused") else None
    steps = 0 if loop == "no length" else 24

    def backward(step: int) -> None:
        if loop == "closure":
            optimizer.zero_grad()
        for part in range(2):
            loss_of(model, 2 * step + part, dist.get_rank()).backward()

    with logged() as lines:
        method = {"no length": "sparta", "flushed": "quantized"}.get(loop, "dense")
        optimizer = make_optimizer(model, method, total_steps=steps)
        if loop == "replaced":
            model.load_state_dict({name: values.clone() for name, values in model.state_dict().items()}, assign=True)
        for step in range(3):
            if loop == "closure":
                optimizer.step(partial(backward, step))
                continue
            backward(step)
            if "clipped" in loop:
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            if loop == "flushed":
                optimizer.flush()
                continue
            if loop == "second gradient":  # such as for a penalty that is logged
                torch.autograd.grad(model(torch.ones(1, 32)).sum(), list(model.parameters()))
            if "zeroed" in loop:
                for p in model.parameters():
                    (p.grad.data if loop == "data zeroed" else p.grad).zero_()
            elif loop == "set to none":
                for p in model.parameters():
                    p.grad = None
            elif "not cleared" not in loop:
                optimizer.zero_grad()
    return "\n".join(lines)


def sharded_warnings() -> str:
    """Return the warnings of a loop with FSDP2, two micro-batches and an unused layer."""
    from torch.distributed.device_mesh import init_device_mesh

    model = shard(make_model().append(nn.Linear(4, 4)), init_device_mesh("cpu", (2,)))
    with logged() as lines:
        optimizer = replicate(model, torch.optim.AdamW(model.parameters()), "dense")
        for step in range(4):
            loss_of(model[:5], step, dist.get_rank()).backward()
            if step % 2:
                optimizer.step()
                model.zero_grad(set_to_none=False)
    return "\n".join(lines)


def warnings_of_loops() -> dict[str, str]:
    mistakes = ("clipped", "not cleared", "unused", "unused, clipped and not cleared", "no length", "replaced")
    return {loop: warned(loop) for loop in (*RIGHT, *mistakes)} | {"sharded": sharded_warnings()}


def test_mistakes_are_named_once(pool2: Pool) -> None:
    """Correct loops have no warning; a last parameter without a gradient hides no mistake."""
    first, other = pool2(warnings_of_loops)
    assert set(other.values()) == {""} and {loop: first[loop] for loop in RIGHT} == dict.fromkeys(RIGHT, "")
    expected = {
        "clipped": "If clip_grad_norm_() does it, remove it and pass max_norm to replicate()",
        "not cleared": "call optimizer.zero_grad() after step()",
        "unused": "1 parameters have no gradient, first 'unused'",
        "no length": "warmup_steps is 0, because the number of steps is unknown; pass total_steps to replicate()",
        "replaced": "no parameter of the optimizer has a gradient. fully_shard() and load_state_dict(assign=True)",
        "sharded": "2 parameters have no gradient, first '5.weight'",
    }
    for loop, text in expected.items():
        assert first[loop].count(text) == 1 and first[loop].count("\n") == 0, first[loop]
    all_three = first["unused, clipped and not cleared"]
    assert all_three.count("\n") == 2 and all(expected[loop] in all_three for loop in list(expected)[:3])


def announced_twice() -> str:
    model = make_model()
    optimizer = make_optimizer(model, "dense", overlap=True)
    optimizer.prepare_last_backward()
    loss_of(model, 0, dist.get_rank()).backward()
    return caught(optimizer.prepare_last_backward)


def test_the_last_backward_pass_is_announced_once(pool2: Pool) -> None:
    for text in pool2(announced_twice):
        assert "call it once per step, before the backward pass of the last micro-batch" in text


# ----------------------------------------------------------------------------------------- two modes


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: the weights are y = 0.9 x + 0.1 z in training, and x in evaluation."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "training": True})

    def _swap(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["training"] != training and "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)
            group["training"] = training

    def train(self) -> None:
        self._swap(True, 0.1)

    def eval(self) -> None:
        self._swap(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for y in group["params"]:
                if y.grad is None:
                    continue
                z: Tensor = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, 1 / group["k"]).sub_(y.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"])))
                z.sub_(y.grad, alpha=group["lr"])


def two_modes(folder: str) -> tuple[bool, bool, list[str]]:
    """Compare with one process in both modes; save before the first step and resume in between."""
    import torch.distributed.checkpoint as dcp

    from torchtitan_scape import checkpoint_states, load_checkpoint

    model, alone = make_model(), make_model()
    reference = ScheduleFree(alone.parameters())
    optimizer = replicate(model, ScheduleFree(model.parameters()), "dense", dist.group.WORLD)
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=f"{folder}/0")
    for step in range(6):
        if step == 3:
            optimizer.eval()
            dcp.save(checkpoint_states(model, optimizer), checkpoint_id=f"{folder}/3")
            model = make_model(seed=3)
            optimizer = replicate(model, ScheduleFree(model.parameters()), "dense", dist.group.WORLD)
            load_checkpoint(f"{folder}/3", model, optimizer)
            optimizer.train()
        train(model, optimizer, range(step, step + 1))
        sum(loss_of(alone, step, rank) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        reference.step()
        reference.zero_grad()
    near = torch.allclose(weights(model), weights(alone), atol=1e-5)
    optimizer.eval()
    reference.eval()
    averaged = torch.allclose(weights(model), weights(alone), atol=1e-5)
    local = replicate(alone, ScheduleFree(alone.parameters()), "sparta", dist.group.WORLD, total_steps=8)
    return near, averaged, [caught(local.train), caught(make_optimizer(make_model(), "dense").eval)]


def test_schedule_free_optimizers(pool2: Pool, tmp_path: Any) -> None:
    for near, averaged, (refused, without) in pool2(two_modes, str(tmp_path)):
        assert near and averaged and without == ""
        assert "ScheduleFree has two modes" in refused and "'sparta' does not exchange" in refused


def gathered_weights() -> list[bool]:
    """Change the weights after a forward pass alone: return whether the next forward pass uses the new ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(make_model(), mesh=mesh["shard"])
    optimizer = replicate(model, ScheduleFree(model.parameters()), "topk", mesh["replicate"])
    train(model, optimizer, range(2))
    x, fresh = batch(0, 0)[0], []
    for change in (optimizer.eval, optimizer.train, optimizer.flush):
        with torch.no_grad():
            before = model(x)
            change()
            after = model(x)
            model.reshard()
            fresh.append(torch.equal(after, model(x)) and not torch.equal(after, before))
    return fresh


def test_weights_that_fsdp2_has_gathered_are_not_outdated(pool2: Pool) -> None:
    """A step of training after an evaluation used the weights of the evaluation."""
    assert pool2(gathered_weights) == [[True] * 3] * 2


# ------------------------------------------------------------------------- hooks of the wrapped optimizer's step


def clamped(cases: list[tuple[str, bool]]) -> list[list[float]]:
    """Limit the weights by two hooks. Return how often each ran until it was removed, and the largest weight."""
    rows = []
    for method, overlap in cases:
        model, ran = make_model(), [0, 0]

        def clamp(number: int, *_: Any, model: nn.Module = model, ran: list[int] = ran) -> None:
            ran[number] += 1
            for parameter in model.parameters():
                parameter.data.clamp_(-0.05, 0.05)

        wrapped = (AdamS if method == "scape" else torch.optim.AdamW)(model.parameters(), lr=0.1)
        first = wrapped.register_step_post_hook(partial(clamp, 0))
        settings = {"max_norm": 1.0, "total_steps": 24, "overlap": overlap}
        optimizer = replicate(model, wrapped, {"method": method}, dist.group.WORLD, **settings)
        wrapped.register_step_post_hook(partial(clamp, 1))
        for steps in (range(2), range(2, 4)):
            optimizer.prepare_last_backward()
            train(model, optimizer, steps, after=optimizer.prepare_last_backward)
            optimizer.zero_grad()  # no backward pass follows the last announcement
            first.remove()
        optimizer.finish_previous_step()
        rows.append([*ran, round(float(weights(model).abs().max()), 6)])
    return rows


def test_hooks_of_the_wrapped_optimizer_run_after_the_exchange(pool2: Pool) -> None:
    """With quantized_update they ran before the changes of the weights arrived, and with scape not at all."""
    cases = [
        ("dense", False),
        ("quantized_update", False),
        ("quantized_update", True),
        ("scape", False),
        ("sparta", False),
    ]
    assert pool2(clamped, cases) == [[[2, 4, 0.05]] * 5] * 2


def calls_of_hooks(methods: list[str]) -> list[list[str]]:
    """Return the calls of both kinds of hooks in six steps, or the error of the first step."""
    rows = []
    for method in methods:
        model, calls = make_model(), list[str]()
        optimizer = make_optimizer(model, method)
        optimizer.inner.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.inner.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        if error := caught(lambda: train(model, optimizer, range(6))):  # noqa: B023
            calls.append(error)
        rows.append(calls)
    return rows


def test_hooks_before_a_step_run_or_are_refused(pool2: Pool) -> None:
    """They never ran with scape, and with onebit_adam only in its warm-up."""
    other = ("scape", "onebit_adam")
    methods = [name for name in METHODS if name not in other]
    for rows in pool2(calls_of_hooks, [*methods, *other]):
        assert rows[: len(methods)] == [["before", "after"] * 6] * len(methods)
        for name, calls in zip(other, rows[len(methods) :], strict=True):
            assert len(calls) == 1 and calls[0].startswith(f"method {name!r} makes the update without the step of Adam")


def compiled_step() -> bool:
    ends = []
    for compiled in (False, True):
        model = make_model()
        optimizer = make_optimizer(model, "quantized_update")
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for number in range(3):
            loss_of(model, number, dist.get_rank()).backward()
            step()
            optimizer.zero_grad()
        ends.append(weights(model))
    return torch.equal(*ends)


def test_a_compiled_step_runs_as_it_is(pool2: Pool) -> None:
    """Its graphs were compiled for minutes."""
    assert pool2(compiled_step) == [True, True]


def inside_autocast(method: str, kind: Any, overlap: bool) -> bool:
    """Compare steps, and backward passes, inside and outside of autocast."""
    ends = []
    for inside in (False, True):
        model = make_model()
        optimizer = replicate(
            model, kind(list(model.named_parameters())), method, dist.group.WORLD, overlap=overlap, total_steps=24
        )
        for number in range(4):
            optimizer.prepare_last_backward()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, number, dist.get_rank())
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.finish_previous_step()
        ends.append(weights(model))
    return torch.equal(*ends)


def every_product_inside_autocast() -> list[bool]:
    muon = partial(Muon, matrices=["2.weight"])
    cases = [("powersgd", torch.optim.AdamW, False), ("demo", torch.optim.AdamW, False), ("dense", muon, False)]
    return [inside_autocast(*case) for case in [*cases, ("quantized_update", muon, True)]]


def test_steps_inside_autocast_have_the_same_bits(pool2: Pool) -> None:
    """It rounded the factors of PowerSGD and the products of bases and transforms to BF16."""
    assert pool2(every_product_inside_autocast) == [[True] * 4] * 2


# ---------------------------------------------------------------------------------------------- end of a run


def left_after(overlap: bool) -> list[str]:
    """Train, forget model and optimizer, and return what still exists on this rank."""
    model = make_model()
    optimizer = make_optimizer(model, "quantized_update", overlap=overlap)
    if overlap:
        optimizer.prepare_last_backward()
    train(model, optimizer, range(1))
    loss_of(model, 1, dist.get_rank())  # with overlap the weights arrive now
    objects = {"optimizer": optimizer, "method": optimizer.methods[0], "model": model, **dict(model.named_parameters())}
    references = {name: weakref.ref(value) for name, value in objects.items()}
    del model, optimizer, objects
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def left_after_runs() -> list[list[str]]:
    return [left_after(overlap) for overlap in (False, True)]


def test_nothing_of_a_run_remains(pool2: Pool) -> None:
    """The first rank kept the weights of every run in a process, and with overlap all ranks the state of the method."""
    assert pool2(left_after_runs) == [[[], []]] * 2
