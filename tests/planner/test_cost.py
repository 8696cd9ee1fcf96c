"""Cost model of a step: terms computed by hand, a simulated pipeline, and the paper's measurements."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.common import RESULTS
from scripts.paper_fit import fit_paper, headline, on_gh200, paper_points, paper_report
from torchtitan_scape.core.workloads import LocalModel, get_workload
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.measurement import least_squares
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import predict, predict_step
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import GIB, MACHINES, Link, Links, get_machine
from torchtitan_scape.topology.partition import chunk_sizes
from torchtitan_scape.topology.traffic import LevelSize, best_chunk_bytes, best_chunks, pipeline_seconds, stage_seconds

LINKS = Links({"a": Link(1e-5, 1e9), "b": Link(1e-4, 1e8), "c": Link(1e-3, 1e7)}, "a test")


# ------------------------------------------------------------------------------------------- the step


def play_pipeline(pack: float, transfer: float, latency: float, chunks: int) -> float:
    """Simulate one packing stage and one link, event by event."""
    packed = sent = 0.0
    for _ in range(chunks):
        packed += pack / chunks
        sent = max(packed, sent) + transfer / chunks + latency
    return sent


times = st.floats(1e-6, 10)


@given(times, times, st.floats(0, 1e-2), st.integers(1, 12))
def test_the_pipeline_formula_equals_a_simulation(pack: float, transfer: float, latency: float, m: int) -> None:
    assert pipeline_seconds(pack, transfer, latency, m) == pytest.approx(play_pipeline(pack, transfer, latency, m))


def test_the_best_number_of_chunks_follows_the_square_root_rule() -> None:
    assert best_chunks(0.016, 10.0, 0.001) == 4  # sqrt(16), the link slower
    assert best_chunks(10.0, 20.0, 1e-9) == 8  # at most
    assert best_chunks(1e-6, 10.0, 0.01) == 1  # nothing to hide
    # sqrt gives 8, but 0.005 is 5 % of 0.1: at most 5 chunks of 0.5
    assert best_chunks(0.32, 0.5, 0.005) == 5


@given(st.integers(1, 10**9), times)
def test_chunks_have_complete_entries_and_cover_the_payload(entries: int, pack: float) -> None:
    nbytes = 4 * entries
    chunk = best_chunk_bytes(nbytes, pack, [LevelSize("a", 2), LevelSize("b", 2)], LINKS)
    assert chunk % 4 == 0 and 1 <= -(-nbytes // chunk) <= 8


SHAPES = ((4096, 1024), (1024, 512), (1000,))
MODEL = LocalModel.of_shapes(SHAPES)
DENSE = PlannedRun(DenseOptions())


def test_a_dense_step_is_the_sum_of_its_parts() -> None:
    p = predict_step(
        DENSE, [LevelSize("b", 4)], LINKS, MODEL,
        compute_seconds=2.0, pack_seconds=0.0, rest_seconds=0.5, shard_seconds=0.25, fixed_seconds=0.125,
    )  # fmt: skip
    chunks = chunk_sizes(MODEL.sizes)
    n = sum(4 * -(-chunk // 4) for chunk in chunks)  # each chunk is padded to 16 bytes
    flag = 4 * 1e-4  # a tree of two levels, up and down
    assert p.exchange == pytest.approx(len(chunks) * 6 * 1e-4 + 2 * 3 / 4 * 4 * n / 1e8 + flag)
    assert p.step == pytest.approx(2.875 + p.exchange)
    assert p.sent == {"b": pytest.approx(6 * n)} and p.hidden == 0


@pytest.mark.parametrize("compute", [0.0, 1.0])
def test_masks_are_exposed_only_beyond_compute(compute: float) -> None:
    """4 replicas, bitmaps: a replica sends 1152 of 4608 blocks of 1024, 147,456 bytes, three times over the link."""
    p = predict_step(
        PlannedRun(ScapeOptions(density=0.25)),
        [LevelSize("b", 4)],
        LINKS,
        MODEL,
        compute_seconds=compute,
        pack_seconds=0.0,
        rest_seconds=0.0,
    )
    payload, mask = 4 * (4608 * 256 + 1000), 3 * 147456
    assert p.sent == {"b": pytest.approx(1.5 * payload + mask)}
    seconds = mask / 1e8 + 3e-4
    expected = 1.5 * payload / 1e8 + 6e-4 + 4e-4 + (0.0 if compute else seconds)
    assert p.exchange == pytest.approx(expected) and p.hidden == pytest.approx(seconds if compute else 0.0)


def test_the_given_number_of_chunks_is_used() -> None:
    def exchange(chunk: int) -> float:
        return predict_step(
            DENSE, [LevelSize("b", 2)], LINKS, MODEL,
            compute_seconds=1.0, pack_seconds=0.0, rest_seconds=0.0, chunk_bytes=chunk,
        ).exchange  # fmt: skip

    nbytes = 4 * sum(map(math.prod, SHAPES))
    assert exchange(-(-nbytes // 10)) - exchange(nbytes) == pytest.approx(9 * 2 * 1e-4)


def test_single_replicas_exchange_nothing() -> None:
    layout = plan_layout(8, ranks_per_node=8, machine=get_machine("frontier"), replicate=1, shard=8)
    links = Links.from_machine(layout.machine)
    p = predict(
        PlannedRun(ScapeOptions(density=0.1)), get_workload("llama_500m"), layout, links, batch=1024, micro_batch=4
    )
    assert p.exchange == 0 and p.sent == {} and p.shard == 0


def test_fsdp_traffic_beyond_compute_is_exposed() -> None:
    """500M on 8 GCDs of 50 GB/s: 7/8 of 8 bytes per parameter in each of 128 micro-batches, and 18 x 21 messages."""
    layout = plan_layout(8, ranks_per_node=8, machine=get_machine("frontier"), replicate=1, shard=8)
    p = predict(
        DENSE, get_workload("llama_500m"), layout, Links.from_machine(layout.machine),
        batch=1024, micro_batch=1, compute_seconds=1.0,
    )  # fmt: skip
    assert p.shard == pytest.approx(128 * (7 * 513590784 / 50e9 + 18 * 21 * 3e-6) - 1.0, rel=1e-3)


def test_every_preset_names_its_device() -> None:
    for machine in MACHINES.values():
        device = machine.device
        assert device.memory > 0 and device.memory_bandwidth > 0 and device.peak > 0 and device.source
    assert get_machine("vista").device.memory_bandwidth == 4000 and get_machine("frontier").device.memory == 64 * GIB


# -------------------------------------------------------------------------------------------- the paper


@given(st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3))
def test_least_squares_recovers_coefficients(truth: list[float]) -> None:
    columns = [[1.0, 1, 1, 1, 1], [1.0, 2, 3, 4, 5], [1e9, 4e9, 9e9, 2e9, 3e9]]
    truth = [truth[0] + 0.1, truth[1], truth[2] * 1e-9]
    measured = [sum(t * c[i] for t, c in zip(truth, columns, strict=True)) for i in range(5)]
    assert least_squares(columns, measured) == pytest.approx(truth, rel=1e-6, abs=1e-9)


def test_least_squares_coefficients_are_not_negative() -> None:
    found = least_squares([[1.0, 1, 1], [1.0, 2, 3]], [3.0, 2, 1])  # falls: the slope would be -1
    assert found[1] == 0 and 1 < found[0] < 3


def test_the_stored_report_is_that_of_the_present_model() -> None:
    said = paper_report()
    assert said.count("| llama_500m |") + said.count("| llama_1_8b |") == 15 + 14 and "4096" in said
    assert (RESULTS / "paper_fit" / "table.md").read_text().strip() == said.strip()  # else: python -m scripts.paper_fit


def test_the_fit_is_within_four_percent_of_the_paper() -> None:
    """The 15 points span 0.9 to 13.5 s. The number of fitted coefficients and their values are fixed."""
    fit = fit_paper()
    residuals = [fit.step(p.model, p.density, p.gpus) / p.seconds - 1 for p in paper_points()]
    assert len(residuals) == 15 and max(map(abs, residuals)) < 0.04
    assert float(np.sqrt(np.mean(np.square(residuals)))) < 0.02
    assert 3e9 < fit.bandwidth < 5e9 and 0.6 < fit.compute["llama_1_8b"] < 0.7
    # Not fitted: Megatron's distributed optimizer, 6 bytes per parameter, 21.48 % efficiency on 64 GPUs.
    held = fit.step("llama_1_8b", 1.0, 4, 0.75) / (16 * fit.step("llama_1_8b", 1.0, 64, 0.75))
    assert held == pytest.approx(0.2148, abs=0.005)


def test_the_speedup_at_low_bandwidth() -> None:
    """Dense relative to SCAPE 0.01, Llama-1.8B on 64 GH200 at 3.5 GB/s: above 6.5 and below the byte ratio.

    The latency of the 37 chunks of dense gradients is half a percent.
    """
    dense, scape = headline(fit_paper().compute["llama_1_8b"])
    assert 6.5 < dense.step / scape.step < dense.step / dense.compute
    n = 1831201280
    assert dense.exchange == pytest.approx(2 * 63 / 64 * 4 * n / 3.5e9 + 37 * 126 * 5e-6, rel=1e-3)
    assert scape.optimizer == pytest.approx(25.00 * n / 2.8e12, rel=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_the_latency_of_64_replicas_is_small(name: str) -> None:
    """On 64 nodes of Vista, at most a tenth of the transfer time.

    SPARTA and PowerSGD send two messages with little content; the exchange of Streaming DiLoCo overlaps with compute.
    1-bit Adam sends five: a chunk has at most a fifth of the model, and one bit per entry of it. So has a column of
    quantized updates, which sends a sixth one because a few replicas own a second large matrix.
    """
    options, model, links = (
        METHODS[name].options(),
        get_workload("llama_1_8b").local(1),
        Links.from_machine(get_machine("vista")),
    )
    levels = [LevelSize("network", 64)]
    calls = PlannedRun(options).options.collective_calls(model, levels)
    latency, transfer = stage_seconds([stage for call in calls for stage in call.stages(levels)], links)
    one = 126 * 5e-6  # an all-reduce
    assert latency <= max(0.1 * transfer, {"onebit_adam": 5.1, "quantized_update": 6.1}.get(name, 2.1) * one)
    if name not in ("sparta", "powersgd", "streaming_diloco", "onebit_adam", "quantized_update"):
        assert latency <= 0.1 * transfer


def test_the_batch_grows_with_more_ranks_than_sequences() -> None:
    steps = {n: on_gh200("llama_1_8b", DENSE, n, 0.64, 4e9).compute for n in (64, 1024, 2048)}
    assert steps == {64: pytest.approx(0.64), 1024: pytest.approx(0.04), 2048: pytest.approx(0.04)}
