"""Three-level sharding in the trainer: against FSDP2, after a NaN, and resumed with the same and with other degrees."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.marks import slow
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, copy_checkpoint, train

PARTS = ("weights", "gradients", "update", "secondary")


def on(w: int, g: int, **options: Any) -> list[str]:
    """Return the arguments of degrees (w, g, 4) and of options of [sharding] and [sharding.levels]."""
    levels = [f"--sharding.levels.{key}={value}" for key, value in {"weights": w, "gradients": g}.items()]
    levels += [
        f"--sharding.levels.{key}={value}" for key, value in options.items() if key in ("update_code", "secondary")
    ]
    degrees = {"data_parallel_replicate_degree": 4 // g, "data_parallel_shard_degree": g}
    return [
        *levels,
        *(f"--sharding.{key}={value}" for key, value in options.items() if key not in ("update_code", "secondary")),
        *(f"--parallelism.{key}={value}" for key, value in degrees.items()),
        f"--topology.ranks_per_node={g}",
    ]


def moments_of(optimizers: Any) -> dict[str, Any]:
    """Return (first entry, shape of the whole parameter, values) of the existing first moments, by name."""
    states = optimizers.inner.state
    if (owned := optimizers.methods[0].owned) is not None:
        names = dict(optimizers.levels.parameters)
        return {
            name: (names[name].start + owned.starts()[name], names[name].whole, values.clone())
            for name, values in owned.moments["exp_avg"].items()
        }
    return {
        name: (p.start, p.whole, states[p]["exp_avg"].view(-1).clone())
        for name, p in optimizers.levels.parameters
        if "exp_avg" in states[p]
    }


def weight_error(levels: Any) -> float:
    """Return the largest distance between a weight and its master on this rank."""
    groups = levels.groups
    distances = [group.master - group.layout.row_slice(group.weights(), group.parts) for group in groups]
    return max(float(distance.abs().max()) for distance in distances if distance.numel())


def train_levels(folder: str, arguments: list[str], nan_at: int | None = None) -> dict[str, Any]:
    """Run `train`; the last rank's gradient has a NaN at step `nan_at`.

    The result also contains every rank's masters and moments at the end, its moments before its first step ("began"),
    and the distance of weights from masters before its first step ("apart").
    """
    from torchtitan_scape.replica.optimizer import ReplicaOptimizer
    from torchtitan_scape.sharding.levels import ThreeLevelState

    containers: list[ReplicaOptimizer] = []
    began: dict[str, Any] = {}
    distances: list[float] = []
    attach, before, steps = ReplicaOptimizer.attach_levels, ThreeLevelState.before_step, [0]

    def spoil(levels: ThreeLevelState) -> None:
        steps[0] += 1
        if steps[0] == 1:
            began.update(moments_of(containers[0]))
            distances.append(weight_error(levels))
        if steps[0] == nan_at and dist.get_rank() == dist.get_world_size() - 1:
            levels.groups[0].reduce.buffer.view(-1)[0] = torch.nan
        before(levels)

    def record(optimizers: ReplicaOptimizer, levels: ThreeLevelState) -> None:
        containers.append(optimizers)
        attach(optimizers, levels)

    with (
        patch.object(ReplicaOptimizer, "attach_levels", record),
        patch.object(ThreeLevelState, "before_step", spoil),
    ):
        found = train(folder, arguments)
    slices = containers[0].levels.parameters if containers[0].levels else []
    found["masters"] = {name: (p.start, p.whole, p.detach().view(-1).clone()) for name, p in slices}
    found["moments"], found["began"], found["apart"] = moments_of(containers[0]), began, distances
    found["summed_over"] = containers[0].guard.summed_over
    return found


def whole(results: list[dict[str, Any]], kind: str) -> dict[str, torch.Tensor]:
    """Return every parameter, assembled from the slices of all ranks."""
    found: dict[str, torch.Tensor] = {}
    for one in results:
        for name, (start, shape, values) in one[kind].items():
            target = found.setdefault(name, torch.full(shape, torch.nan)).view(-1)
            target[start : start + len(values)] = values
    return found


@pytest.mark.parametrize("w, g, method", [(2, 4, "adamw"), slow(1, 2, "adams")])
def test_steps_are_those_of_fsdp(w: int, g: int, method: str, pool4: Pool, tmp_path: Path) -> None:
    """Raw messages, two micro-batches, clipping, recomputed layers: losses and norms agree up to FP32 rounding."""
    more = ["--training.steps=3", "--training.local_batch_size=1", "--training.global_batch_size=8"]
    more += ["--activation_checkpoint.mode=selective", "--optimizer.eps=1e-6"]
    runs = [
        pool4(train, str(tmp_path / name), [*METHODS[method], *where, *more])
        for name, where in (("levels", on(w, g, update_code="float32")), ("plain", LAYOUTS["2x2"]))
    ]
    for one, other in zip(*runs, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-4)


SAVING = [
    "--training.steps=6",
    "--checkpoint.enable",
    "--checkpoint.interval=3",
    "--checkpoint.no-last-save-model-only",
]
CODED = {"weights_code": "int8", "gradients_code": "int4"}


@pytest.mark.parametrize(
    "method, where, more, nan_at",
    [
        ("adamw", on(2, 4, **CODED), ["--training.mixed_precision_param=bfloat16"], 2),
        ("quantized-update", on(1, 2, gradients_code="int8"), ["--optimizer.name=AdamW"], 2),
        slow("scape-int4", on(1, 2, gradients_code="int8"), ["--checkpoint.async_mode=async"], None),
    ],
)
def test_resuming_equals_the_uninterrupted_run(
    method: str, where: list[str], more: list[str], nan_at: int | None, pool4: Pool, tmp_path: Path
) -> None:
    """Losses, norms and weights are bitwise equal; the weights' bits are saved, because differences determined them."""
    arguments = [*METHODS[method], *where, *more, *SAVING, "--training.steps=4", "--checkpoint.interval=2"]
    run = pool4(train_levels, str(tmp_path / "whole"), arguments, nan_at=nan_at)
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 2)
    resumed = pool4(train_levels, str(tmp_path / "resumed"), arguments)
    assert run[0]["summed_over"] == ("all ranks" if method == "adamw" else "the ranks of its node")
    for a, b in zip(run, resumed, strict=True):
        assert len(b["losses"]) == 2 and b["losses"] == a["losses"][2:] and b["norms"] == a["norms"][2:]
        assert torch.equal(a["parameters"], b["parameters"])
        assert a["skipped"] == (0 if nan_at is None else 1)
        for kind in ("masters", "moments"):
            assert all(torch.equal(a[kind][name][2], b[kind][name][2]) for name in a[kind])


@pytest.mark.slow
def test_compiled_blocks(pool4: Pool, tmp_path: Path) -> None:
    """Hooks and masters are outside the compiled region."""
    more = ["--training.steps=3", "--training.mixed_precision_param=bfloat16"]
    arguments = [*METHODS["adamw"], *on(2, 4, **CODED), *more]
    plain = pool4(train, str(tmp_path / "plain"), arguments)
    compiled = pool4(train, str(tmp_path / "compiled"), [*arguments, "--compile.enable"], timeout=600)
    assert compiled[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-3)


@pytest.mark.slow
def test_other_degrees_load_masters_and_moments_unchanged(pool4: Pool, tmp_path: Path) -> None:
    """From three levels to other degrees, to FSDP2's shards and back. A step with a learning rate of 0 shows the loaded
    state.
    """
    arguments = [*METHODS["adamw"], *SAVING, "--lr_scheduler.warmup_steps=0"]
    saved = pool4(train_levels, str(tmp_path / "1"), [*arguments, *on(2, 4, **CODED), "--training.steps=3"])
    for number, where in enumerate((on(1, 2), on(2, 2, gradients_code="int4"))):
        target = tmp_path / f"to{number}"
        copy_checkpoint(tmp_path / "1", target, 3)
        resumed = pool4(train_levels, str(target), [*arguments, *where, "--optimizer.lr=0", "--training.steps=4"])
        masters, expected = whole(resumed, "masters"), whole(saved, "masters")
        assert all(torch.equal(masters[name], values) for name, values in expected.items())
        began, moments = whole(resumed, "began"), whole(saved, "moments")
        assert len(moments) == 21 and all(torch.equal(began[name], values) for name, values in moments.items())
    copy_checkpoint(tmp_path / "1", tmp_path / "plain", 3)
    # Validation is off, because FSDP2's last group stays unsharded after it.
    plain = [*arguments, *LAYOUTS["2x2"], "--optimizer.lr=0", "--validation.no-enable"]
    shards = pool4(train, str(tmp_path / "plain"), [*plain, "--training.steps=4"])
    order = list(whole(saved, "masters").values())
    own = torch.cat([values.chunk(2)[0].reshape(-1) for values in order])
    assert torch.equal(shards[0]["parameters"], own)
    copy_checkpoint(tmp_path / "plain", tmp_path / "back", 4)
    more = [*on(2, 4), "--optimizer.lr=0", "--training.steps=5"]
    again = pool4(train_levels, str(tmp_path / "back"), [*arguments, *more])
    masters = whole(again, "masters")
    assert all(torch.equal(masters[name], values) for name, values in whole(saved, "masters").items())


@pytest.mark.slow
def test_weights_follow_masters_loaded_from_local_updates(pool4: Pool, tmp_path: Path) -> None:
    """A checkpoint within a round. The run starts from the mean of the differing replicas, not from the saved model."""
    arguments = [*SAVING, "--training.steps=3", "--checkpoint.interval=2", "--validation.no-enable"]
    pool4(train, str(tmp_path / "1"), [*arguments, *METHODS["diloco"], *LAYOUTS["2x2"]])
    copy_checkpoint(tmp_path / "1", tmp_path / "2", 2)
    more = [*METHODS["adamw"], *on(2, 4, update_code="float32")]
    resumed = pool4(train_levels, str(tmp_path / "2"), [*arguments, *more])
    assert [one["apart"] for one in resumed] == [[0.0]] * 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            on(2, 4) + METHODS["topk"],
            "method = 'topk' is not supported with .*weights = 2; set 'dense' or",
        ),
        (
            [*on(2, 4), "--sync.method=scape", *METHODS["scape-gather-bf16"]],
            'weights_dtype = "bfloat16" is not supported with',
        ),
        ([*on(2, 4), "--sync.method=dense", "--sync.overlap"], "overlap = true is not supported with"),
        ([*on(2, 4), "--topology.simulate_replicas=2"], "simulate_replicas = 2 is not supported with"),
        ([*on(2, 4), "--checkpoint.export_dtype=bfloat16"], "export_dtype = 'bfloat16' is not supported with"),
        (on(1, 2, weights_code="int8"), "weights_code = 'int8'; with .* weights = 1 nothing is gathered"),
        (on(2, 4, gradients_code="int8+int4"), "gradients_code = 'int8.int4'; gradients of .* stay within the node"),
        ([*on(2, 4), "--topology.ranks_per_node=2"], "gradients = 4; sharding groups must not span nodes"),
        ([*on(2, 2), "--parallelism.tensor_parallel_degree=2"], "three-level sharding supports only data parallelism"),
    ],
)
def test_incompatible_options_are_refused(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_scape.config.checks import check_config
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.layout import layout_of

    monkeypatch.setenv("WORLD_SIZE", "8" if "tensor" in message + str(arguments) else "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=message):
        config = parse(["--job.config_file=train_configs/embedded.toml", *METHODS["adams"], *arguments])
        check_config(config, "cpu")
        config.sharding.check(layout_of(config))
