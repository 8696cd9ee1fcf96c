"""Parallelism layout: axis order, groups, link levels, and errors of wrong launches."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_scape.topology.layout import Layout, plan_layout, ranks_per_node_from_environment
from torchtitan_scape.topology.machines import MACHINES, detect_machine, get_machine

# TorchTitan's dense mesh is ("pp", "dp_replicate", "fsdp", "tp"), with fsdp = shard x context, context inner.
MESH = ("pipeline", "replicate", "shard", "context", "tensor")


def plan(world_size: int, ranks_per_node: int, machine: str = "frontier", **degrees: int) -> Layout:
    degrees = {"replicate": 1, "shard": 1} | degrees
    return plan_layout(world_size, ranks_per_node=ranks_per_node, machine=get_machine(machine), **degrees)


def mesh_of(layout: Layout) -> np.ndarray:
    """Return the expected mesh: ranks in row-major order, as in DeviceMesh."""
    return np.arange(layout.world_size).reshape([getattr(layout, axis) for axis in MESH])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(st.integers(1, 4)) for axis in MESH}
    world_size = math.prod(degrees.values())
    ranks_per_node = draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    return plan(world_size, ranks_per_node, draw(st.sampled_from(sorted(MACHINES))), **degrees)


any_layout = settings(max_examples=60, deadline=None)


@any_layout
@given(layouts())
def test_ranks_are_row_major(layout: Layout) -> None:
    for index, rank in np.ndenumerate(mesh_of(layout)):
        assert layout.coordinates(int(rank)) == dict(zip(MESH, index, strict=True))


@any_layout
@given(layouts())
def test_groups_are_the_mesh_slices_and_partition_the_ranks(layout: Layout) -> None:
    mesh = mesh_of(layout)
    by_replica = np.moveaxis(mesh, MESH.index("replicate"), 0).reshape(layout.replicate, -1)
    # A column holds the same parameters in replica order; a row is one replica.
    assert layout.replicate_groups() == tuple(sorted(map(tuple, by_replica.T.tolist())))
    assert layout.model_groups() == tuple(map(tuple, by_replica.tolist()))
    for groups in (layout.replicate_groups(), layout.model_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@settings(max_examples=20, deadline=None)
@given(layouts(), st.data())
def test_the_group_of_a_rank_is_the_one_that_lists_it(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    for own, groups in (
        (layout.replicate_group(rank), layout.replicate_groups()),
        (layout.model_group(rank), layout.model_groups()),
    ):
        assert rank in own and own in groups
    assert layout.replicate_group(rank)[layout.coordinates(rank)["replicate"]] == rank
    # The two groups have only this rank in common.
    assert set(layout.replicate_group(rank)) & set(layout.model_group(rank)) == {rank}


@any_layout
@given(layouts(), st.data())
def test_levels_are_symmetric_and_network_means_another_node(layout: Layout, data: st.DataObject) -> None:
    a, b = (data.draw(st.integers(0, layout.world_size - 1)) for _ in range(2))
    assert layout.level(a, b) == layout.level(b, a)
    assert (layout.level(a, b) == "network") == (layout.node(a) != layout.node(b))
    assert layout.level(a, a) == layout.machine.levels[0].name


def test_frontier_levels() -> None:
    layout = plan(16, 8, replicate=2, shard=8)
    assert [layout.node(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert [layout.level(0, rank) for rank in (1, 2, 7, 8)] == ["gcd_pair", "node", "node", "network"]
    assert layout.level(1, 2) == "node"  # adjacent ranks on two packages
    assert layout.level(7, 8) == "network"  # adjacent ranks on two nodes
    assert layout.level(14, 15) == "gcd_pair"


def test_a_pair_does_not_span_nodes_of_odd_size() -> None:
    """Pairs are counted from the first rank of a node, not from rank 0: 3 and 4 are a pair, 2 and 3 are not."""
    layout = plan(6, 3, replicate=6)
    assert layout.level(2, 3) == "network"
    assert layout.level(3, 4) == "gcd_pair"
    assert layout.level(4, 5) == "node"


@pytest.mark.parametrize("machine", ["dgx-a100", "local"])
def test_without_gcd_pairs_levels_start_at_the_node(machine: str) -> None:
    layout = plan(16, 8, machine, replicate=2, shard=8)
    assert [layout.level(0, rank) for rank in (0, 1, 7, 8)] == ["node", "node", "node", "network"]


def test_successor_levels_count_the_link_to_the_successor() -> None:
    layout = plan(16, 8, replicate=2, shard=8)
    node = layout.model_group(0)
    assert [layout.successor_level(rank, node) for rank in node] == ["gcd_pair", "node"] * 4
    assert layout.successor_level(3, layout.replicate_group(3)) == "network"
    assert layout.successor_level(11, layout.replicate_group(11)) == "network"  # the wrap-around to replica 0
    assert layout.successor_level(5, (5,)) == "gcd_pair"  # a group of one


@pytest.mark.parametrize(
    ("ranks_per_node", "degrees", "inside"),
    [
        (8, {"replicate": 3, "shard": 8}, True),
        (8, {"replicate": 6, "shard": 4}, True),
        (8, {"replicate": 24}, True),
        (8, {"shard": 24}, False),
        (8, {"replicate": 2, "shard": 12}, False),
        (8, {"replicate": 3, "shard": 4, "tensor": 2}, True),
        (8, {"replicate": 2, "shard": 4, "context": 3}, False),
        # 3 ranks per node: the degree is smaller than a node, but ranks 2 and 3 are a group on two nodes.
        (3, {"replicate": 12, "shard": 2}, False),
        (3, {"replicate": 8, "shard": 3}, True),
        (6, {"replicate": 12, "shard": 2}, True),
    ],
)
def test_shard_axis_inside_node(ranks_per_node: int, degrees: dict[str, int], inside: bool) -> None:
    assert plan(24, ranks_per_node, **degrees).shard_axis_inside_node is inside


def test_pipeline_stages_on_two_nodes_leave_the_shard_axis_inside() -> None:
    """FSDP's groups are ranks 0-7 and 8-15, one node each; only activations cross the network."""
    assert plan(16, 8, shard=8, pipeline=2).shard_axis_inside_node


def test_vista_replicas_are_whole_nodes() -> None:
    layout = plan(32, 1, "vista", replicate=-1)
    assert (layout.replicate, layout.shard) == (32, 1)
    assert layout.replicate_groups() == (tuple(range(32)),)
    assert layout.model_groups() == tuple((rank,) for rank in range(32))
    assert {layout.successor_level(rank, layout.replicate_group(rank)) for rank in range(32)} == {"network"}
    assert layout.shard_axis_inside_node


def test_frontier_64_ranks() -> None:
    layout = plan(64, 8, replicate=-1, shard=8)
    assert layout.replicate_group(11) == (3, 11, 19, 27, 35, 43, 51, 59)
    assert layout.model_group(11) == tuple(range(8, 16))
    line = layout.describe()
    assert "\n" not in line
    for part in ("64 ranks on 8 node", "of 8 (frontier)", "replicate 8 x shard 8", "stays inside a node"):
        assert part in line
    assert line.endswith("replicas communicate over network")


def test_describe_with_one_replica() -> None:
    assert "one replica" in plan(8, 8, shard=8).describe()


def test_describe_names_the_network_when_only_some_links_cross_it() -> None:
    """Two replicas per node: in group order, the links 1-2 and 3-0 cross nodes, and 0-1 does not."""
    assert "network" in plan(4, 2, "local", replicate=4).describe()


@pytest.mark.parametrize(
    ("degrees", "replicate", "shard"),
    [
        ({"replicate": -1, "shard": 8}, 6, 8),
        ({"replicate": 2, "shard": -1}, 2, 24),
        ({"replicate": -1, "shard": 2, "tensor": 4, "pipeline": 3}, 2, 2),
        ({"replicate": 2, "shard": -1, "context": 2, "tensor": 3}, 2, 4),
        ({"replicate": -1, "shard": 48}, 1, 48),
        ({"replicate": 4, "shard": 12}, 4, 12),
    ],
)
def test_minus_one_is_derived_from_the_other_degrees(degrees: dict[str, int], replicate: int, shard: int) -> None:
    layout = plan(48, 8, **degrees)
    assert (layout.replicate, layout.shard) == (replicate, shard)


@pytest.mark.parametrize(
    ("ranks_per_node", "degrees", "message"),
    [
        (8, {"replicate": -1, "shard": -1}, "both -1"),
        (8, {"replicate": 0, "shard": 16}, "replicate degree is 0"),
        (8, {"replicate": -2, "shard": 16}, "replicate degree is -2"),
        (8, {"replicate": 16, "shard": 0}, "shard degree is 0"),
        (8, {"replicate": -1, "context": 0}, "context degree is 0"),
        (8, {"replicate": -1, "tensor": -1}, "tensor degree is -1"),
        (8, {"replicate": -1, "pipeline": 0}, "pipeline degree is 0"),
        (8, {"replicate": 2, "shard": 4}, "replicate 2 x shard 4.* 8 ranks.* 16 "),
        (8, {"replicate": 4, "shard": 8}, "16 ranks.*(replicate 4|shard 8)"),
        (8, {"replicate": -1, "shard": 3}, "16 ranks.*shard 3"),
        (32, {"replicate": 16}, "32 ranks per node.*16 ranks"),
        (0, {"replicate": 16}, "0 ranks per node"),
        (5, {"replicate": 16}, "16 ranks.*nodes of 5"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_numbers(ranks_per_node: int, degrees: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(16, ranks_per_node, **degrees)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "WORLD_SIZE": "32"}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 8),
        ({"SLURM_TASKS_PER_NODE": "1(x32)"}, 1),
        ({"SLURM_TASKS_PER_NODE": "4"}, 4),
        # torchrun under srun: Slurm starts one task per node, and torchrun starts the ranks.
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, 8),
        # The requested number is an upper limit; the job step has the actual one.
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, 4),
        # A process that was started by hand in an allocation of larger nodes.
        ({"SLURM_NTASKS_PER_NODE": "128"}, None),
        # A step of two nodes inside an allocation of four.
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "8(x4)"}, 2),
    ],
)
def test_ranks_per_node_from_the_launcher(environ: dict[str, str], expected: int | None) -> None:
    assert ranks_per_node_from_environment(environ, 64) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCAL_WORLD_SIZE", "eight"),
        ("LOCAL_WORLD_SIZE", ""),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "-4"),
        ("SLURM_NTASKS_PER_NODE", "8.0"),
        ("SLURM_TASKS_PER_NODE", "8(x3),4"),
        ("SLURM_STEP_TASKS_PER_NODE", "4,8(x3)"),
        ("SLURM_STEP_TASKS_PER_NODE", "8(x)"),
    ],
)
def test_a_malformed_or_uneven_launch_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        ranks_per_node_from_environment({name: value}, 64)
    assert repr(value) in str(error.value)


def test_machines_are_consistent() -> None:
    assert set(MACHINES) == {"vista", "frontier", "dgx-a100", "dgx-h100", "dgx-h200", "ethernet-10g", "local"}
    for name, machine in MACHINES.items():
        assert (machine.name, get_machine(name)) == (name, machine)
        names = [level.name for level in machine.levels]
        assert names == (["gcd_pair"] if name == "frontier" else []) + ["node", "network"]
        assert machine.levels[-2].ranks == machine.ranks_per_node
        assert machine.source


@pytest.mark.parametrize(
    ("device", "machine"),
    [
        ("NVIDIA GH200 120GB", "vista"),
        ("AMD Instinct MI250X", "frontier"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA H200", "dgx-h200"),
        ("AMD Instinct MI300X", "local"),
        ("", "local"),
    ],
)
def test_detect_machine(device: str, machine: str) -> None:
    assert detect_machine(device) == machine


def test_an_unknown_machine_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"'summit'.*vista.*frontier.*dgx-a100.*local"):
        get_machine("summit")


@any_layout
@given(layouts())
def test_hierarchies_reach_every_member_once(layout: Layout) -> None:
    """The product of the sizes is the size of the group, and each tier partitions the group."""
    for group in layout.replicate_groups():
        tiers = layout.hierarchy(group)
        assert math.prod(tier.size for tier in tiers) == len(group)
        for tier in tiers:
            assert tier.size > 1
            assert sorted(rank for ranks in tier.groups for rank in ranks) == sorted(group)
            assert {len(ranks) for ranks in tier.groups} == {tier.size}
        # Following the tiers from one rank reaches every rank exactly once.
        reached = [group[0]]
        for tier in tiers:
            group_of = {rank: ranks for ranks in tier.groups for rank in ranks}
            reached = [other for rank in reached for other in group_of[rank]]
        assert sorted(reached) == sorted(group)


def test_hierarchies_of_frontier() -> None:
    sizes = {
        (16, 8, 16, 1): [("gcd_pair", 2), ("node", 4), ("network", 2)],
        (16, 8, 4, 4): [("node", 2), ("network", 2)],
        (16, 8, 2, 8): [("network", 2)],
        (6, 3, 6, 1): [("node", 3), ("network", 2)],  # pairs of 2 and of 1: the level is skipped
    }
    for (world, per_node, replicate, shard), expected in sizes.items():
        layout = plan(world, per_node, replicate=replicate, shard=shard)
        assert [(tier.level, tier.size) for tier in layout.hierarchy(layout.replicate_group(0))] == expected
