"""Limits of an optimizer step on meta tensors: operators, launches and bytes at a small shape."""

import json
import math

import pytest

from scripts.benchmarks.record_steps import CASES, SETTINGS, record
from scripts.benchmarks.step_operators import StepCount, count_step, count_whole_step
from torchtitan_scape.core.workloads import LocalModel, Workload, get_workload
from torchtitan_scape.methods.options import STORED
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.topology.partition import chunk_limit

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


@pytest.mark.parametrize("name", ["sparta", "quantized"])
def test_a_full_exchange_has_the_buffers_of_two_chunks_in_fp32(name: str) -> None:
    """It had those of chunks as long as the encoded ones, up to a fifth of the model each, of several buffers."""
    model, replicas = LocalModel.of_shapes([(1 << 14, 1 << 14)] * 4), 16
    assert count_step(name, model, replicas, full=True).peak < 20 * 2 * chunk_limit(model.entries, replicas)


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
    model = get_workload("llama_500m").local(1)
    assert count_step("tagc", model, 16).bytes / model.entries <= 60


@pytest.mark.parametrize(
    ("name", "number", "case"),
    [
        ("topk", 0, 4),
        ("sparta", 0, 2),
        ("quantized", 2, 5),
        ("quantized_update", 3, 0),
        ("diloco", 0, 1),
        ("dense", 0, 4),
    ],
)
def test_a_recording_is_that_of_the_present_step(name: str, number: int, case: int) -> None:
    """Else: python -m scripts.benchmarks.record_steps."""
    entries = [entry for entry in json.loads(STORED.read_text())["settings"] if entry["method"] == name]
    replicas, _, _, *stored, held = entries[number]["rows"][case]
    assert CASES[case][0] == replicas and [entry["options"] for entry in entries] == SETTINGS.get(name, [{}])
    present = record(name, entries[number]["options"], *CASES[case])
    assert present.held == held and present[:2] == pytest.approx(stored, rel=0.01, abs=0.01)


def test_every_method_is_recorded() -> None:
    """All but that with closed forms of its passes."""
    names = {entry["method"] for entry in json.loads(STORED.read_text())["settings"]}
    assert names == {name for name, entry in METHODS.items() if not entry.options.holds_optimizer_state}


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
