"""Limits of an optimizer step on meta tensors: operators, launches and bytes at a small shape."""

import math

import pytest

from scripts.benchmarks.step_operators import OPTIONS, StepCount, count_step, count_whole_step
from torchtitan_scape.core.workloads import Workload, get_workload
from torchtitan_scape.methods.quantized.method import Quantized
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.registry import METHODS

MODEL, DEEPER = (Workload("tiny", layers, 256, 4, 2, 512, 1000, 64, 64).local(1) for layers in (4, 8))


def per_parameter(count: StepCount) -> float:
    return count.bytes / MODEL.entries


@pytest.mark.parametrize(("name", "operators"), [("topk", 40), ("demo", 40), ("sparseloco", 2000), ("powersgd", 2000)])
def test_selection_and_decoding_do_not_depend_on_the_replicas(name: str, operators: int) -> None:
    """At most this number of operators and launches for 24 layers, and 60 bytes a parameter."""
    few, many = (count_step(name, MODEL, replicas) for replicas in (4, 64))
    assert (few.operators, few.triton) == (many.operators, many.triton)
    deeper = count_step(name, DEEPER, 4)
    four, eight = (count.operators + count.triton for count in (few, deeper))
    assert four + (24 - 4) / 4 * (eight - four) <= operators
    assert per_parameter(few) <= 60
    assert per_parameter(many) <= per_parameter(few) + 12  # the messages of 60 more replicas


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_step_on_meta_tensors(name: str) -> None:
    count = count_step(name, MODEL, 4)
    assert count.collectives and (name == "dense" or (count.launches and count.peak and per_parameter(count) > 0))
    assert per_parameter(count) < 300


def test_the_backends_take_the_same_collectives() -> None:
    one, other = (count_step("quantized", MODEL, 4, backend) for backend in ("torch", "triton"))
    assert one.collectives == other.collectives and not one.triton and other.triton


@pytest.mark.parametrize("replicas", [4, 16])
def test_sparta_moves_at_most_1_3_times_the_minimum(replicas: int) -> None:
    """Of a third of the entries: anchor and parameter are read, then read and written, and an owner's errors too."""
    assert per_parameter(count_step("sparta", MODEL, replicas)) <= 1.3 * (24 + 16 / replicas) / 3


def test_dense_exchanges_in_place() -> None:
    """No copy into a buffer; the sum over replicas is not divided."""
    counted = count_step("dense", get_workload("llama_1_8b").local(1), 4)
    assert not counted.bytes and not counted.operators and counted.collectives < 30


@pytest.mark.parametrize("density", [0.4, 0.1])
def test_radius_moves_at_most_1_3_times_the_minimum(density: float) -> None:
    """Gradient and residual are read and written; the payload is written and read."""
    counted = per_parameter(count_step("radius", MODEL, 16, density=density))
    assert counted <= 1.3 * (16 + 8 * density + 0.25)


@pytest.mark.parametrize("replicas", [4, 64])
@pytest.mark.parametrize(("code", "bits"), [("e2m1", 4), ("2bit", 2)])
def test_quantized_moves_at_most_1_5_times_the_minimum(code: str, bits: int, replicas: int) -> None:
    """Gradient and residual are read and written; messages are written, summed, written and read."""
    coded = bits / 8 + 2 / 128
    least = 16 + coded * (3 + 1 / replicas) + 8 / replicas
    assert per_parameter(count_step("quantized", MODEL, replicas, code=code)) <= 1.5 * least


def test_tagc_moves_at_most_60_bytes() -> None:
    """At a size with several chunks, which are exchanged in place; 16 replicas send all entries."""
    model, options = get_workload("llama_500m").local(1), METHODS["tagc"].options()
    counted = count_step("tagc", model, 16).bytes / model.entries
    assert counted <= 60
    assert counted == pytest.approx(sum(options.cost().memory_traffic(model, 16)) / model.entries, rel=0.15)


@pytest.mark.parametrize("replicas", [4, 16])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        (name, {})
        for name in (
            "sparta",
            "radius",
            "quantized",
            "topk",
            "demo",
            "powersgd",
            "sparseloco",
            "diloco",
            "noloco",
            "co2",
        )
    ]
    + [("dense", {}), ("onebit_adam", {}), ("quantized", {"code": "2bit"})],
)
def test_the_planner_has_the_counted_bytes(name: str, more: dict[str, str], replicas: int) -> None:
    """Within 15 percent at this size, where padding and small parameters weigh more."""
    options = METHODS[name].options(**OPTIONS.get(name, {}), **more)
    rounds = getattr(options, "inner_steps", 1)
    planned = rounds * sum(options.cost().memory_traffic(MODEL, replicas)) / MODEL.entries
    assert per_parameter(count_step(name, MODEL, replicas, **more)) == pytest.approx(planned, rel=0.15)


CODED: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in ("dense", "quantized", "sparta", "onebit_adam", "radius", "topk")),
    ("quantized", {"code": "2bit"}),
    ("sparta", {"code": "float32"}),
]


@pytest.mark.parametrize("replicas, per_node", [(4, 2), (64, 4)])
@pytest.mark.parametrize(("name", "more"), CODED)
def test_the_planner_has_the_counted_bytes_of_nodes(
    name: str, more: dict[str, str], replicas: int, per_node: int
) -> None:
    """On two levels encoded exchanges use buffers. Within 15 percent, at a size with several chunks."""
    model = get_workload("llama_1_8b").local(1)
    cost = METHODS[name].options(**OPTIONS.get(name, {}), **more).cost()
    planned = (sum(cost.memory_traffic(model, replicas)) + cost.buffer_traffic(model, replicas)) / model.entries
    counted = count_step(name, model, replicas, per_node=per_node, **more).bytes / model.entries
    assert counted == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize("code", ["e2m1", "2bit"])
def test_the_planner_has_the_counted_bytes_with_overlap(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that starts before the check for non-finite gradients reads them again."""
    start_chunk, cost = Quantized.start_chunk, QuantizedOptions(code=code).cost()
    monkeypatch.setattr(Quantized, "start_chunk", lambda *arguments: start_chunk(*arguments[:-1], applied=None))
    planned = (sum(cost.memory_traffic(MODEL, 16)) + cost.overlap_traffic(MODEL, 16)) / MODEL.entries
    assert per_parameter(count_step("quantized", MODEL, 16, code=code)) == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("interval", [1, 2])
def test_the_planner_has_the_counted_bytes_of_quantized_update(interval: int) -> None:
    """Within 5 percent, with equal shares. The count contains AdamS, 20 bytes for an entry that a replica updates."""
    model = get_workload("llama_1_8b").local(1)
    cost = METHODS["quantized_update"].options(interval=interval, whiten_every=0).cost()
    planned = sum(cost.memory_traffic(model, 4)) / model.entries
    counted = count_step("quantized_update", model, 4, interval=interval).bytes / model.entries
    assert counted == pytest.approx(planned + 20 / (4 * interval), rel=0.05)


LARGE = get_workload("llama_1_8b").local(1)  # 219 parameters
# Methods with a fixed number of passes, and the least bytes a parameter of a step that are known for some.
PASSES = ("scape", "sparta", "quantized", "quantized_update", "dense", "topk", "onebit_adam", "radius")
LEAST = {"dense": 36.0, "sparta": 40.0, "topk": 56.0}


@pytest.mark.parametrize("name", PASSES)
def test_a_whole_step_has_few_launches_operators_and_views(name: str) -> None:
    """None of them for every parameter; and clipping reads and writes no gradient in a pass of its own."""
    count = count_whole_step(name, LARGE, 8)
    assert count.triton <= 60 and count.operators + count.views <= 200
    assert count.bytes <= 1.15 * LEAST.get(name, math.inf) * LARGE.entries
    assert count.bytes <= 1.01 * count_whole_step(name, LARGE, 8, max_norm=None).bytes
