"""Limits of an optimizer step on meta tensors: operators, launches and bytes at a small shape."""

import pytest

from scripts.benchmarks.step_operators import StepCount, count_step
from torchtitan_scape.core.workloads import Workload
from torchtitan_scape.methods.registry import METHODS

MODEL, DEEPER = (Workload("tiny", layers, 256, 4, 2, 512, 1000, 64, 64).local(1) for layers in (4, 8))


def per_parameter(count: StepCount) -> float:
    return count.bytes / MODEL.entries


@pytest.mark.parametrize("name", ["topk", "demo", "sparseloco", "powersgd"])
def test_selection_and_decoding_do_not_depend_on_the_replicas(name: str) -> None:
    """At most 2,000 operators and launches for 24 layers. SparseLoCo also moves 32 bytes outside its exchange."""
    few, many = (count_step(name, MODEL, replicas) for replicas in (4, 64))
    assert (few.operators, few.triton) == (many.operators, many.triton)
    deeper = count_step(name, DEEPER, 4)
    four, eight = (count.operators + count.triton for count in (few, deeper))
    assert four + (24 - 4) / 4 * (eight - four) <= 2000
    assert per_parameter(few) <= (60 + 32 if name == "sparseloco" else 60)
    assert per_parameter(many) <= per_parameter(few) + 12  # the messages of 60 more replicas


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_step_on_meta_tensors(name: str) -> None:
    count = count_step(name, MODEL, 4)
    assert count.operators and count.collectives and count.peak and 0 < per_parameter(count) < 300


def test_the_backends_take_the_same_collectives() -> None:
    one, other = (count_step("quantized", MODEL, 4, backend) for backend in ("torch", "triton"))
    assert one.collectives == other.collectives and not one.triton and other.triton
