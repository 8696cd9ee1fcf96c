"""Resuming methods with per-replica weights: parameters, moments and pending updates."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.checkpoint.runs import SAVING, WHERE, first_halves, largest, pool_of, run, whole
from tests.marks import slow
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, RECIPE
from torchtitan_scape.checkpoint.state import states
from torchtitan_scape.methods.interface import State
from torchtitan_scape.sharding.base import Sharding

# After step 6 in the middle of a round; of "streaming" and "co2" an exchange is in flight.
LOCAL = {
    "diloco": [*METHODS["diloco"], "--sync.diloco.inner_steps=4"],
    "diloco-muon": [*METHODS["diloco-muon"], "--sync.diloco.inner_steps=4"],
    "muloco": [
        *METHODS["diloco-muon"],
        "--sync.diloco.inner_steps=4",
        "--sync.diloco.code=e2m1",
        "--sync.diloco.decay=0.9",
    ],
    "streaming": [*METHODS["streaming"], "--sync.streaming_diloco.code=float32"],
    "sparta": METHODS["sparta"],
    "sparseloco": ["--sync.method=sparseloco", "--sync.sparseloco.inner_steps=4", "--sync.sparseloco.density=0.1"],
    "co2": [*METHODS["co2"], "--sync.co2.inner_steps=4"],
    "noloco": [*METHODS["noloco"], "--sync.noloco.inner_steps=4"],
}
SIGNS = ["--optimizer.name=SignSGD", "--optimizer.lr=1e-3"]  # without moments
LOCAL["diloco-signs"] = [*LOCAL["diloco"], *SIGNS]
HERE = METHODS | LOCAL | {"signs": [*METHODS["adams"], *SIGNS]}
DISPLACEMENTS = ("residual", "owner_error", "displacement_in_flight")
KINDS = ("anchor", "parameters", "exp_avg", "exp_avg_sq", "outer_momentum", "in_flight", *DISPLACEMENTS)
KINDS += ("slow_weights", "slow_momentum")


@pytest.mark.parametrize("residual", ["mean", "drop"])
def test_means_are_kept_on_the_host(residual: str) -> None:
    """The device had no room for a second copy of weights and moments."""
    collectives = SimpleNamespace(sum_over_replicas=lambda _: None, replicas=2)
    with FakeTensorMode():
        weights = State("replica_weights", {"w": torch.ones(3, device="cuda")}, True, "copy")
        method = SimpleNamespace(checkpoint_states=lambda _: [weights], owned=None)
        optimizer: Any = SimpleNamespace(
            replicas=SimpleNamespace(run=lambda work: [work(0)], endpoints=[]),
            methods=[method],
            weights=[],
            collectives=collectives,
            guard=SimpleNamespace(usual_norms=[]),
            sharding=Sharding(),
            shards=list,
        )
        (saved,) = states(optimizer, residual)
        assert saved.tensors["w"].device.type == "cpu"


def means(trainer: Any) -> dict[str, dict[str, Tensor]]:
    """Return the mean over replicas of every state by kind and parameter, unsharded, FP64."""
    from torchtitan_scape.core.parameters import local

    optimizers = trainer.replica_optimizer
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    each = optimizers.weights or [None]
    for number, shard in enumerate(optimizers.shards()):
        rows: dict[str, list[Tensor]] = {}
        for i, one in enumerate(each):
            own = shard if one is None else one.shards[number]
            optimizer = optimizers.inner if one is None else one.optimizer
            mine = {"parameters": local(own.parameter.detach())}
            mine |= {k: local(v) for k, v in optimizer.state[own.parameter].items() if k in KINDS}
            for state in optimizers.methods[i].states():
                if shard.name in state.tensors:
                    mine[state.kind] = state.tensors[shard.name]
            for kind, values in mine.items():
                rows.setdefault(kind, []).append(values.double())
        for kind, of_each in rows.items():
            mean = torch.stack(of_each).mean(0)
            optimizers.collectives.sum_over_replicas(mean)
            mean = mean / optimizers.collectives.replicas
            if kind in KINDS:
                found[kind][shard.name] = whole(mean, shard.parameter)
    steps = enumerate(one["step"].clone() for one in optimizers.inner.state.values() if "step" in one)
    return {kind: values for kind, values in (found | {"step": dict(steps)}).items() if values}


def trained(folder: str, arguments: list[str], steps: int) -> dict[str, Any]:
    return run(folder, arguments, steps, means)


def model_of(states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the anchor, or the mean of the slow weights."""
    return states["anchor"] if "anchor" in states else states["slow_weights"]


def where_it_starts(saved: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of the parameters, minus the mean of the pending updates."""
    (left,) = [saved[kind] for kind in DISPLACEMENTS if kind in saved] or [{}]
    return {n: values - left.get(n, torch.zeros(())) for n, values in saved["parameters"].items()}


@pytest.fixture(scope="module")
def first_half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return first_halves(request, tmp_path_factory, trained, HERE)


@pytest.mark.parametrize(
    "before, after, method, into",
    [
        ("3 alone", "1x2", "diloco", "diloco"),
        slow("4x1", "1x2", "diloco", "diloco"),
        slow("2x2", "3 simulated", "streaming", "streaming"),
        slow("1x2", "1x2", "sparseloco", "diloco"),
        slow("1x2", "2x1", "sparseloco", "adams"),
        slow("4x1", "1x2", "sparta", "diloco"),
        slow("6 simulated", "6 simulated", "sparta", "sparta"),  # so many that owners owe
        ("6 alone", "3 simulated", "sparta", "sparta"),
        slow("6 simulated", "3 simulated", "sparta", "sparta"),
        ("6 alone", "2x1", "sparta", "adamw"),
        slow("1x2", "2x1", "sparta", "adamw"),
        slow("1x2", "1x2", "diloco", "adamw"),
        slow("1x2", "1x2", "diloco", "scape"),
        ("3 alone", "1x2", "adamw", "diloco"),
        slow("1x2", "1x2", "adamw", "diloco"),
        slow("1x2", "4x1", "diloco-muon", "diloco"),
        ("3 alone", "1x2", "muloco", "muloco"),
        slow("1x2", "1x2", "muloco", "diloco"),
        slow("1x2", "1x2", "signs", "diloco-signs"),
        slow("1x2", "1x2", "diloco-signs", "diloco"),
        slow("1x2", "1x2", "diloco-signs", "adamw"),
        slow("tensor", "2x1", "streaming", "sparseloco"),
        ("3 alone", "1x2", "co2", "co2"),
        slow("4x1", "1x2", "co2", "co2"),
        slow("1x2", "1x2", "co2", "diloco"),
        ("3 alone", "2x1", "co2", "adamw"),
        slow("1x2", "2x1", "co2", "adamw"),
        slow("1x2", "1x2", "streaming", "co2"),
        slow("1x2", "1x2", "sparseloco", "co2"),
        ("3 alone", "1x2", "noloco", "noloco"),
        slow("4x1", "1x2", "noloco", "noloco"),
        slow("3 simulated", "3 simulated", "noloco", "noloco"),
        ("3 alone", "1x2", "noloco", "diloco"),
        slow("1x2", "1x2", "noloco", "diloco"),
        slow("1x2", "1x2", "diloco", "noloco"),
        slow("1x2", "2x1", "noloco", "adamw"),
        slow("1x2", "1x2", "adamw", "noloco"),
    ],
)
def test_local_state_migrates_to_another_layout_or_method(
    before: str, after: str, method: str, into: str, first_half: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The anchor is the model; a run with another method starts at the mean of the replicas' weights."""
    saved = first_half(before, method, tmp_path)[0]["after"]
    steps = 9 if into in LOCAL else 7  # rounds of four steps end at step 8
    results = pool_of(after, request)(trained, str(tmp_path), [*HERE[into], *WHERE[after]], steps)
    found = results[0]["loaded"]
    (line,) = results[0]["resume_lines"]
    if method in LOCAL and into in LOCAL:
        # The mean of three or more replicas is rounded to FP32.
        assert largest(model_of(found), model_of(saved)) <= (1e-7 if method == "noloco" else 0.0)
        kept = any(kind in found for kind in DISPLACEMENTS if kind in saved)
        assert ("owner_error" in saved) == before.startswith("6") and ("owner_error" in found) == after.startswith("6")
        assert largest(found["parameters"], saved["parameters"] if kept else where_it_starts(saved)) < 1e-6
        for kind in ("outer_momentum", "in_flight", "slow_momentum", *DISPLACEMENTS):
            if kind in saved and kind in found:
                assert found[kind].keys() == saved[kind].keys() and largest(found[kind], saved[kind]) < 1e-6, kind
        assert ("in_flight" in saved) == (method == "streaming")
        assert ("displacement_in_flight" in saved) == (method == "co2")
    elif method in LOCAL:
        assert largest(found["parameters"], where_it_starts(saved)) < 1e-6
    else:
        assert largest(model_of(found), saved["parameters"]) == largest(found["parameters"], saved["parameters"]) == 0.0
    for kind in ("exp_avg", "exp_avg_sq"):
        if kind in saved and kind in found:
            # Muon has no second moment of a block's matrices.
            both = saved[kind].keys() & found[kind].keys()
            own, theirs = ({n: values[kind][n] for n in both} for values in (found, saved))
            assert both and largest(own, theirs) < 1e-6, kind
    if "step" in found:  # bias corrections of moments that begin start anew
        begins = "signs" in method and "signs" not in into
        assert {float(step) for step in found["step"].values()} == {0.0 if begins else 6.0}
    if method == "diloco-muon":
        anew = found["exp_avg_sq"].keys() - saved["exp_avg_sq"].keys()
        assert len(anew) == 14 and all(n.startswith("layers.") for n in anew)  # seven in each of two layers
        first, second = ({n: found[kind][n] for n in anew} for kind in ("exp_avg", "exp_avg_sq"))
        assert largest({n: values.square() for n, values in first.items()}, second) < 1e-6
    if (before, method) == (after, into):
        assert "every replica its own" in line
    else:
        assert "replicas" in line or "means" in line or "mean" in line or "moment" in line, line
    # A first round of CO2 ends at step 8 with a return to the anchor.
    assert all(r["loss"] < 5.7 or (into == "co2" and method != "co2") for r in results)


@pytest.mark.parametrize(
    "method, residual, signs",
    [
        ("sparseloco", "mean", []),
        *(slow("sparseloco", "drop", signs) for signs in ([], SIGNS)),
        ("noloco", "mean", []),
        slow("noloco", "drop", []),
    ],
)
def test_a_checkpoint_with_means_can_be_resumed(
    method: str, residual: str, signs: list[str], pool2: Pool, tmp_path: Path
) -> None:
    """Or only the model, for a method without outer momentum and an optimizer without moments."""
    arguments = [*LOCAL[method], *LAYOUTS["1x2"], f"--checkpoint.residual={residual}", *signs]
    saved = pool2(trained, str(tmp_path), arguments, 6)[0]["after"]
    found = pool2(trained, str(tmp_path), arguments, 9)[0]["loaded"]  # with the end of a round
    assert largest(model_of(found), model_of(saved)) <= (1e-7 if method == "noloco" else 0.0)
    assert method != "noloco" or largest(found["slow_momentum"], saved["slow_momentum"]) < 1e-6
    assert signs or largest(found["exp_avg"], saved["exp_avg"]) < 1e-6
    wanted = saved["parameters"] if residual == "mean" else model_of(saved)
    assert largest(found["parameters"], wanted) < 1e-6
    residuals = found.get("residual", {}).values()
    assert all(bool(values.any()) == (residual == "mean") for values in residuals if values.ndim > 1)


def validated(folder: str, arguments: list[str]) -> tuple[float, float, bool]:
    """Return the final validation loss of a run, that of a run that starts from its model, and whether all replicas of
    the second run start from that model."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    common = [*RECIPE, *SAVING, *arguments, "--validation.enable", "--training.steps=6"]
    trainer = ScapeTrainer(parse([*common, f"--job.dump_folder={folder}"]))
    with patch("time.sleep"):
        trainer.train()
    loss, model = trainer.validator.last_loss, model_of(means(trainer))
    trainer.close()
    start = f"--checkpoint.initial_load_path={folder}/checkpoint/step-6"
    other = ScapeTrainer(parse([*common, start, f"--job.dump_folder={folder}/other"]))
    with patch("time.sleep"):
        other.checkpointer.load()
        found = means(other)
        other.validator.validate(other.model_parts, 1)
    same = all(largest(values, model) < 1e-7 for values in (model_of(found), found["parameters"]))
    again = other.validator.last_loss
    other.close()
    assert loss is not None and again is not None
    return loss, again, same


@pytest.mark.parametrize("method", ["streaming", slow("noloco")])
def test_the_anchor_or_the_mean_is_validated_and_saved(method: str, pool2: Pool, tmp_path: Path) -> None:
    """With FSDP2 shards of two replicas."""
    layout = [*LAYOUTS["2x1"], "--topology.simulate_replicas=2"]
    arguments = [*LOCAL[method], *layout, "--checkpoint.async_mode=async"]
    for loss, again, same in pool2(validated, str(tmp_path), arguments):
        assert loss == again and same


def test_validation_does_not_change_training(pool2: Pool, tmp_path: Path) -> None:
    """FSDP2 keeps gathered parameters after a forward pass without a backward pass."""
    arguments = [*LOCAL["diloco"], *LAYOUTS["2x1"], "--topology.simulate_replicas=2", "--validation.enable"]
    often, never = (
        pool2(trained, str(tmp_path / freq), [*arguments, f"--validation.freq={freq}"], 4)[0] for freq in ("2", "100")
    )
    assert often["loss"] == never["loss"] and largest(often["after"]["parameters"], never["after"]["parameters"]) == 0.0
