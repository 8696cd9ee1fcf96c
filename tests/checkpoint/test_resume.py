"""Resuming with another layout, method or other options preserves pending updates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.runs import WHERE, first_halves, largest, pool_of, run, whole
from tests.marks import slow
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, train


def pending(trainer: Any) -> dict[str, torch.Tensor]:
    """Return b1 * first moment + mean of residuals by parameter, unsharded, FP64, read from the steps' buffers."""
    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.kernels.scape import reference

    optimizers = trainer.replica_optimizer
    found = {}
    every = optimizers.collectives.replicas
    holds_state = optimizers.options.holds_optimizer_state
    for shard in () if holds_state else optimizers.shards():
        moment = local(optimizers.inner.state[shard.parameter].get("exp_avg", torch.zeros(shard.size)))
        left = torch.zeros(shard.size, dtype=torch.float64)
        for method in optimizers.methods:
            for state in (state for state in method.states() if state.is_gradient and shard.name in state.tensors):
                left += method.pending_gradient(state, shard.name).double()
        if optimizers.collectives.groups.replicate is not None:
            dist.all_reduce(left, group=optimizers.collectives.groups.replicate)
        # A gradient enters the moment times 1 - b1.
        found[shard.name] = 0.9 * moment.double().view(-1) + 0.1 * left / every
    for scape in optimizers.methods if holds_state else ():
        passes, masks = scape.passes, scape.masks
        layout = passes.tensors
        for i, shard in enumerate(scape.ordered):
            bits = layout.bits(masks.previous, i) if i < len(layout.sizes) else None
            held = torch.ones(shard.size, dtype=torch.bool)
            if bits is not None:
                held = reference.unpack_bits(bits, shard.size)
            total = torch.zeros(shard.size, dtype=torch.float64)
            if passes.owner is not None:
                for number, (parameter, start, end) in enumerate(passes.slices):
                    if parameter != i:
                        continue
                    stretch = slice(start, end)
                    if i < len(layout.sizes):
                        total[stretch] += passes.kept()[number].double()
                    if passes.owner.owns(number):
                        common = passes.owner.share_of(passes.owner.common, number).double()
                        total[stretch] += common * torch.where(held[stretch], 0.9, 1.0) * scape.collectives.replicas
            else:
                total += passes.kept()[i].double() * torch.where(held, 0.9, 1.0)
            if passes.code_residual.numel() and passes.at_target(masks.previous) and not masks.in_use.dense:
                for number, (parameter, start, end) in enumerate(passes.slices):
                    if parameter == i:
                        total[start:end][held[start:end]] += passes.code_residual_of(number).double()
            if scape.collectives.groups.replicate is not None:
                dist.all_reduce(total, group=scape.collectives.groups.replicate)
            found[shard.name] = found.get(shard.name, 0.0) + total / every
    return {
        shard.name: whole(found[shard.name].view(local(shard.parameter).shape), shard.parameter)
        for shard in optimizers.shards()
    }


def look(trainer: Any) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    parameters = {shard.name: shard.parameter.detach() for shard in trainer.replica_optimizer.shards()}
    masks = getattr(trainer.replica_optimizer.methods[0], "masks", None)
    return {
        "pending": pending(trainer),
        "weights": {k: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for k, p in parameters.items()},
        "dense": None if masks is None else masks.in_use.dense,
        "tokens": trainer.ntokens_seen,
    }


def first(folder: str, arguments: list[str], steps: int = 6) -> dict[str, Any]:
    """Return the state when the checkpoint is written."""
    found = run(folder, arguments, steps, look)
    return found["after"] | {"loss": found["loss"]}


def second(folder: str, arguments: list[str]) -> dict[str, Any]:
    """Return the state after loading, and the weights two steps later."""
    found = run(folder, arguments, 8, look)
    return found["loaded"] | {
        "loss": found["loss"],
        "resume_lines": found["resume_lines"],
        "after": found["after"]["weights"],
    }


@pytest.fixture(scope="module")
def first_half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return first_halves(request, tmp_path_factory, first, METHODS)


@pytest.mark.parametrize(
    "before, after, method, into",
    [
        ("3 alone", "1x2", "scape", "scape"),  # 3 -> 2
        slow("4x1", "1x2", "scape", "scape"),  # 4 -> 2
        slow("1x2", "4x1", "scape", "scape"),  # 2 -> 4
        slow("4x1", "3x1", "scape", "scape"),
        ("1x2", "3 simulated", "scape", "scape"),
        slow("4x1", "3 simulated", "scape", "scape"),
        slow("2x1", "4x1", "scape", "scape"),  # 1 -> 4, and shards 2 -> 1
        slow("2x2", "1x2", "scape", "scape"),  # shards alone
        slow("tensor", "2x1", "scape", "scape-gather"),
        slow("nodes", "1x2", "scape-int4", "scape-gather"),
        slow("1x2", "4x1", "scape-gather", "scape-int8"),
        slow("1x2", "4x1", "scape-int4", "scape-gather-2bit"),
        slow("1x2", "2x1", "scape-gather-bf16", "scape"),
        slow("2x1", "1x2", "scape", "scape-gather-bf16"),
        ("3 alone", "1x2", "scape", "adams"),
        slow("4x1", "1x2", "scape", "adams"),
        slow("1x2", "1x2", "scape-gather", "adamw"),
        ("3 alone", "2x1", "adamw", "scape"),
        slow("1x2", "2x1", "adamw", "scape"),
        slow("1x2", "4x1", "topk", "muon"),
        slow("1x2", "4x1", "quantized-2bit", "quantized-2bit"),
        slow("4x1", "1x2", "demo", "topk"),
        slow("1x2", "2x1", "demo", "adamw"),
        slow("2x1", "1x2", "adams", "scape-offload"),
        slow("4x1", "1x2", "topk", "topk"),
        slow("1x2", "4x1", "topk", "topk"),
        slow("4x1", "3 simulated", "topk", "topk"),
        slow("2x2", "1x2", "topk", "powersgd"),  # shards alone, and the method
        slow("4x1", "1x2", "powersgd", "powersgd"),
        # 3 shards of 200 rows are uneven, and one of them may be too small to be factored.
        slow("3 shards", "1x2", "powersgd-32", "powersgd"),
        slow("tensor", "2x1", "powersgd", "topk-adams"),
        slow("4x1", "1x2", "radius-adams", "radius"),
        slow("2x2", "1x2", "radius-adams", "topk-adams"),  # shards alone, and the method
        slow("1x2", "4x1", "radius-adams", "radius-adams"),
        slow("1x2", "1x2", "radius-adams", "adamw"),
        slow("1x2", "1x2", "topk", "radius"),
        ("3 alone", "1x2", "topk", "adamw"),
        slow("1x2", "1x2", "topk", "adamw"),
        slow("1x2", "2x1", "topk-adams", "scape"),
        slow("1x2", "1x2", "scape-gather", "topk-adams"),
        slow("4x1", "1x2", "scape", "powersgd"),
    ],
)
def test_another_layout_or_method_keeps_pending_updates(
    before: str, after: str, method: str, into: str, first_half: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The mean over replicas of moment and residual, the parameters, and the number of tokens do not change."""
    saved = first_half(before, method, tmp_path)
    resumed = pool_of(after, request)(
        second,
        str(tmp_path),
        [*METHODS[into], *WHERE[after]],
    )
    assert largest(saved[0]["pending"], resumed[0]["pending"]) < 1e-6
    narrow = "bf16" in into
    assert largest(saved[0]["weights"], resumed[0]["weights"]) < (4e-3 if narrow or method.endswith("bf16") else 1e-9)
    (line,) = resumed[0]["resume_lines"]
    assert any(
        said in line
        for said in ("next exchange is complete", "added to the first moment", "pending gradients", "as it was")
    )
    if into.startswith("scape"):
        assert all(r["dense"] for r in resumed)
    if before != "tensor":  # Its ranks read the same tokens.
        before_save, loaded = (sum(rank["tokens"] for rank in ranks) for ranks in (saved, resumed))
        assert before_save - len(resumed) < loaded <= before_save
    for other in resumed[1:]:
        assert largest(resumed[0]["after"], other["after"]) == 0.0
    assert resumed[0]["loss"] < saved[0]["loss"] + 0.5


@pytest.mark.parametrize(
    "method, changed, dense",
    [
        ("scape", ["--sync.scape.density=0.05", "--training.global_batch_size=8", "--training.max_norm=2"], False),
        ("scape", ["--training.mixed_precision_param=bfloat16", "--optimizer.decay_exclude=vectors"], False),
        slow("scape", ["--optimizer.beta1=0.8", "--optimizer.lr=1e-3", "--sync.scape.no-staleness_scaling"], False),
        slow("scape", ["--sync.scape.block_size=128"], True),
        slow("scape-tensor", ["--sync.scape.staleness_scaling"], False),
        ("scape-gather", ["--sync.scape.selection=tensor"], True),
    ],
)
def test_options_may_change(
    method: str, changed: list[str], dense: bool, first_half: Any, pool2: Pool, tmp_path: Path
) -> None:
    arguments = [*METHODS[method], *LAYOUTS["1x2"]]
    saved = first_half("1x2", method, tmp_path)
    resumed = pool2(second, str(tmp_path), [*arguments, *changed])
    for a, b in zip(saved, resumed, strict=True):
        assert largest(a["weights"], b["weights"]) == 0.0
        assert largest(a["pending"], b["pending"]) < (1e-6 if dense else 1e-12)
        assert b["dense"] == dense
    (line,) = resumed[0]["resume_lines"]
    names = {option.split("=")[0].split(".")[-1].removeprefix("no-").replace("beta1", "betas") for option in changed}
    assert all(f"{name} " in line for name in names) and ("next exchange is complete" in line) == dense
    assert largest(resumed[0]["after"], resumed[1]["after"]) == 0.0


@pytest.mark.parametrize("method", ["scape", slow("scape-int4"), slow("scape-gather")])
@pytest.mark.parametrize("residual", ["mean", "drop"])
def test_residuals_saved_as_a_mean_or_dropped(method: str, residual: str, pool2: Pool, tmp_path: Path) -> None:
    arguments = [*METHODS[method], *LAYOUTS["1x2"], f"--checkpoint.residual={residual}"]
    saved = pool2(first, str(tmp_path), arguments)
    resumed = pool2(second, str(tmp_path), arguments)
    distance = largest(saved[0]["pending"], resumed[0]["pending"])
    assert distance < 1e-6 if residual == "mean" else distance > 0.1
    assert resumed[0]["dense"] is False
    assert residual in resumed[0]["resume_lines"][0] or "not saved" in resumed[0]["resume_lines"][0]
    assert largest(resumed[0]["after"], resumed[1]["after"]) == 0.0


@pytest.mark.parametrize("method", ["scape", *map(slow, ("sparta", "scape-int4", "scape-gather-2bit"))])
def test_the_last_step_can_be_dense(method: str, pool2: Pool, tmp_path: Path) -> None:
    """No residual remains, even if that step is skipped, and replicas are equal; otherwise the norm is logged."""
    arguments = [*METHODS[method], *LAYOUTS["1x2"], "--training.steps=5"]
    flush = ["--sync.flush_at_end"]
    for folder, more, nan_at in (("flushed", flush, None), ("skipped", flush, 5), ("left", [], None)):
        results = pool2(train, str(tmp_path / folder), [*arguments, *more], nan_at=nan_at)
        assert all(result["skipped"] == (nan_at is not None) for result in results)
        if method != "sparta" or more:  # else replicas differ
            assert torch.equal(results[0]["parameters"], results[1]["parameters"])
        norm = json.loads((tmp_path / folder / "summary.json").read_text())["residual_norm"]
        assert (norm == 0.0) == bool(more)


def masters_or_weights(trainer: Any) -> dict[str, Any]:
    """Return the FP32 masters if the method keeps any, else the weights."""
    optimizer = trainer.replica_optimizer
    states = {state.kind: state.tensors for state in optimizer.methods[0].states()}
    weights = {shard.name: shard.parameter.detach().clone() for shard in optimizer.shards()}
    return states.get("master", weights)


def masters(folder: str, arguments: list[str]) -> Any:
    return run(folder, arguments, 6, masters_or_weights)["after"]


def loaded_weights(folder: str, arguments: list[str]) -> Any:
    return run(folder, arguments, 7, masters_or_weights)["loaded"]


def test_another_method_continues_from_the_masters(pool2: Pool, tmp_path: Path) -> None:
    saved = pool2(masters, str(tmp_path), [*METHODS["scape-gather-bf16"], *LAYOUTS["1x2"]])
    loaded = pool2(loaded_weights, str(tmp_path), [*METHODS["adams"], *LAYOUTS["1x2"]])
    assert largest(saved[0], loaded[0]) == 0.0 == largest(saved[0], loaded[1])
