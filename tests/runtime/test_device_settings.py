"""Checks of settings against the device."""

import pytest

from torchtitan_scape.runtime.device_settings import ALLOCATOR, check_precision, check_queues, set_allocator


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "HOME"])
def test_expandable_segments_unless_the_user_configured_the_allocator(name: str) -> None:
    environment = {name: ""}
    set_allocator(environment, "2.11.0+cu128")
    assert environment.get(ALLOCATOR) == ("expandable_segments:True" if name == "HOME" else environment.get(ALLOCATOR))
    assert (ALLOCATOR in environment and environment[ALLOCATOR] != "") == (name == "HOME")
    on_rocm: dict[str, str] = {}
    set_allocator(on_rocm, "2.11.0+rocm6.4")
    assert not on_rocm


def test_one_hardware_queue_is_refused_where_collectives_overlap() -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with pytest.raises(ValueError, match=r"CUDA_DEVICE_MAX_CONNECTIONS = 1 gives .*; unset it, or set it to 8 or more"):
        check_queues(one, rocm=False, collectives_overlap=True)
    assert check_queues(one, rocm=False, collectives_overlap=False) == []
    for value in ("8", "32", "2"):
        assert check_queues({"CUDA_DEVICE_MAX_CONNECTIONS": value}, rocm=False, collectives_overlap=True) == []
    assert check_queues({}, rocm=False, collectives_overlap=True) == []


@pytest.mark.parametrize(("queues", "warned"), [("", True), ("2", True), ("8", False)])
def test_few_queues_of_rocm_are_warned_about(queues: str, warned: bool) -> None:
    environment = {"GPU_MAX_HW_QUEUES": queues} if queues else {}
    lines = check_queues(environment, rocm=True, collectives_overlap=True)
    assert [("set GPU_MAX_HW_QUEUES=8" in line) for line in lines] == [True] * warned
    assert check_queues(environment, rocm=True, collectives_overlap=False) == []


def test_bf16_on_a_cpu_that_has_no_products_of_it_is_warned_about() -> None:
    (line,) = check_precision("AVX2", "bfloat16")
    assert line.startswith('[training] mixed_precision_param = "bfloat16" on a CPU without AVX-512')
    assert check_precision("AVX2", "float32") == check_precision("AVX512", "bfloat16") == []
