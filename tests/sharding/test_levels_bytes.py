"""Traffic and memory of three-level sharding, counted, against the closed forms."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.pool import Pool
from tests.toy import sum_gradients
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Prediction, predict
from torchtitan_scape.sharding.cost import FlatRow, LevelsPlan, ShardPlan, coded, flat_rows
from torchtitan_scape.sharding.levels import build_levels
from torchtitan_scape.sharding.options import LevelsOptions, ShardingOptions
from torchtitan_scape.topology.groups import build_level_groups
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import Links, get_machine
from torchtitan_scape.topology.traffic import TrafficLedger

ENTRIES = 64 * 128  # Entries of a matrix whose slices are whole blocks.
MICRO_BATCHES = 2


def _counted(weights: int, gradients: int, levels: dict[str, Any], options: dict[str, Any], sums: bool) -> Any:
    """Return the bytes by level and kind of the micro-batches and of a step, and the entries stored per rank."""
    chosen = ShardingOptions(levels=LevelsOptions(weights, gradients, **levels), **options)
    layout = plan_layout(4, ranks_per_node=gradients, machine=get_machine("frontier"), replicate=-1, shard=gradients)
    groups = build_level_groups(layout, weights, timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (4 // weights, weights), mesh_dim_names=("holders", "fsdp"))["fsdp"]
    model, traffic = nn.Sequential(nn.Linear(128, 64, bias=False)), TrafficLedger()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    sum_gradients(model)
    made = build_levels(model, chosen, layout, groups, traffic, sums=sums, bf16=False, kernels="torch")
    for _ in range(MICRO_BATCHES):
        model(torch.randn(2, 128)).square().sum().backward()
    micro_batch = {(level, kind): sent for (_, level, kind), sent in traffic.sent.items()}
    made.before_step()
    made.after_step(None)
    step = {
        (level, kind): sent - micro_batch.get((level, kind), 0.0) for (_, level, kind), sent in traffic.sent.items()
    }
    (group,) = made.groups
    held = group.reduce.buffer.numel(), group.master.numel(), sum(p.numel() for _, p in made.parameters)
    return micro_batch, {key: sent for key, sent in step.items() if sent}, held


@pytest.mark.parametrize(
    "degrees, levels, options, sums",
    [
        ((2, 4), {"update_code": "float32"}, {}, True),
        ((2, 4), {}, {"weights_code": "int8", "gradients_code": "int4"}, True),
        ((2, 4), {"secondary": 2}, {"weights_code": "int8", "gradients_code": "int8"}, True),
        ((2, 2), {"sum_code": "int8", "update_code": "bfloat16"}, {"gradients_code": "int8"}, True),
        ((1, 2), {}, {"gradients_code": "int4"}, True),
        ((1, 2), {}, {"gradients_code": "int4"}, False),
    ],
)
def test_bytes_and_entries_match_the_closed_forms(
    degrees: tuple[int, int], levels: dict[str, Any], options: dict[str, Any], sums: bool, pool4: Pool
) -> None:
    (w, g), n = degrees, ENTRIES
    layout = plan_layout(4, ranks_per_node=g, machine=get_machine("frontier"), replicate=-1, shard=g)
    plan = ShardingOptions(levels=LevelsOptions(w, g, **levels), **options).planned(layout, "float32", sums=sums)
    assert isinstance(plan, LevelsPlan)
    link_level = {"pair": "gcd_pair", "node": "gcd_pair" if g == 2 else "node", "network": "network"}

    def expected(bytes_of: dict[tuple[str, str], float], times: int) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for (over, kind), sent in bytes_of.items():
            found[link_level[over], kind] = found.get((link_level[over], kind), 0.0) + times * sent
        return {key: sent for key, sent in found.items() if sent}

    ranks = pool4(_counted, w, g, levels, options, sums)
    micro_batch = plan.micro_batch_bytes(n)
    for number, (wanted, times) in enumerate(((micro_batch, MICRO_BATCHES), (plan.step_bytes(n), 1))):
        mean: dict[tuple[str, str], float] = {}
        for key, sent in (item for rank in ranks for item in rank[number].items()):
            mean[key] = mean.get(key, 0.0) + sent / len(ranks)
        assert mean == pytest.approx(expected(wanted, times), abs=64)  # Messages are padded to 16 bytes.
    assert {rank[2] for rank in ranks} == {(n // g, n // (4 if sums else g), n // (4 if sums else g))}


def test_the_published_figures_follow() -> None:
    """w = 2, g = 8, N nodes, INT8 gathers and INT4 gradients, scales neglected."""
    plan = LevelsPlan(2, 8, 16, gathered=1.0, reduced=0.5, update=1.0)
    micro, step = plan.micro_batch_bytes(1.0), plan.step_bytes(1.0)
    assert (micro["pair", "weights"], micro["pair", "gradients"]) == (1.0, 1 / 16)
    assert micro["node", "gradients"] == 3 / 8 and step["node", "update"] == 3 / 8
    assert step["network", "gradients"] + step["network", "update"] == pytest.approx(5 / 8 * 15 / 16)
    layout = plan_layout(128, ranks_per_node=8, machine=get_machine("frontier"), replicate=16, shard=8)
    kinds = {"parameters": 4.0 * 2**13, "gradients": 4.0 * 2**13, "state": 8.0 * 2**13}
    held = plan.memory(kinds, [FlatRow(((1 << 17, 1),))], layout)
    lasting = sum(value for kind, value in held.items() if kind not in ("summed gradients", "shard messages"))
    assert lasting == 1.5 * 2**20 + 12 * 2**20 / 128
    # Largest model for 64 GiB on 80 GCDs, with the paper's secondary partition and 16-bit gradients.
    largest = 64 * 2**30 / (2 / 2 + 1 / 2 + 2 / 8 + 12 / 80)
    assert largest == pytest.approx(36e9, rel=0.01)
    assert coded(8, 256) == 1.015625


def test_the_recipe_for_frontier_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GCDs. A rank stores half the model, and an eighth of the gradients that its node reduces and SCAPE
    exchanges.
    """
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.planner.configured import shard_axis_of
    from torchtitan_scape.report.memory import MemoryReport
    from torchtitan_scape.trainer.layout import layout_of
    from torchtitan_scape.trainer.specs import register

    monkeypatch.setenv("NGPU", "64")
    config = parse(["--job.config_file=train_configs/llama_1_8b_frontier.toml", "--comm.mode=fake_backend"])
    register(config, with_data=False)
    layout, n = layout_of(config), 1_831_201_280
    kinds, (plan, rows) = MemoryReport.of(config, layout, None).kinds, shard_axis_of(config, layout)
    assert (kinds["parameters"], kinds["gradients"]) == (n, n / 2)
    assert kinds["masters"] == kinds["state"] == pytest.approx(n / 2, rel=0.001)
    sent = plan.sent([replace(row, gathers=2) for row in rows], layout, 4)
    assert sent["gcd_pair", "weights"] == 4 * n * coded(8, 256)
    assert sent["node", "gradients"] == 4 * coded(4, 128) * n * 6 / 8
    assert sent["node", "update"] == coded(8, 256) * n * 6 / 16
    assert not any(level == "network" for level, _ in sent)


def test_predicted_step_time_on_frontier() -> None:
    """48 nodes. Nominal links also hide FSDP2's traffic; at a tenth of the network bandwidth SCAPE is 1.5 x faster."""
    machine, workload = get_machine("frontier"), get_workload("llama_1_8b")
    layout = plan_layout(384, ranks_per_node=8, machine=machine, replicate=48, shard=8)
    plan = LevelsPlan(2, 8, 48, gathered=coded(8, 256), reduced=coded(4, 128), summed=0.0, update=coded(8, 256))
    scape = PlannedRun(ScapeOptions(density=0.05, code="int4"))
    dense = PlannedRun(DenseOptions(), overlap=True)
    for bandwidth, least in ((12.5e9, 0.98), (1.25e9, 1.49)):
        links = Links.from_machine(machine).with_bandwidth("network", bandwidth)

        def step(method: PlannedRun, links: Links = links, **plan: Any) -> Prediction:
            return predict(method, workload, layout, links, batch=1536, micro_batch=4, **plan)

        ours = step(scape, shard_axis=plan)
        assert least < step(dense).step / ours.step < least + 0.05
        assert ours.memory["gradients"] == 4.0 * workload.parameters / 8
    rows = flat_rows(workload, 8)
    each, once = plan.seconds(rows, layout, links, 1)
    assert each < ShardPlan().seconds(rows, layout, links, 1)[0]
    # With dense gradients, the levels themselves sum gradients and send the update between nodes.
    levels = replace(plan, summed=4.0)
    sums = predict(dense, workload, layout, links, batch=1536, micro_batch=4, shard_axis=levels)
    assert sums.exchange < 1e-3 and sums.fixed > once
