"""What a step moves and holds, against the kernels' block arithmetic and the models that TorchTitan builds."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.codec.formats import FORMATS, message_bytes
from kernels.scape.blocks import BlockLayout
from torchtitan_scape.core.workloads import WORKLOADS, get_workload, local_shapes
from torchtitan_scape.methods.scape.cost import kernel_bytes
from torchtitan_scape.methods.topk.blocks import coded_by, mask_bytes, payload_bytes, payload_entries, width
from torchtitan_scape.optimizers.cost import hidden_shapes
from torchtitan_scape.planner.gradient_volumes import powersgd_rank
from torchtitan_scape.planner.volumes import (
    PlannedRun,
    host_bytes,
    host_link_bytes,
    memory_bytes,
    messages,
    optimizer_bytes,
    simulated_memory_bytes,
)

SHAPES = ((4096, 1024), (1024, 512), (1000,))

shapes_of = st.lists(
    st.one_of(st.tuples(st.integers(1, 9000)), st.tuples(st.integers(1, 90), st.integers(1, 90))),
    min_size=1,
    max_size=8,
)


@given(shapes_of, st.sampled_from([0.5, 0.1, 0.03, 0.01, 0.001, 1.0]), st.integers(1, 9), st.sampled_from([64, 1024]))
def test_payload_and_mask_are_those_of_the_kernels(shapes: list, density: float, replicas: int, block: int) -> None:
    sparse = [math.prod(s) for s in shapes if len(s) > 1]
    layout = BlockLayout(tuple(sparse), block, replicas)
    entries = sum(layout.nnz(i, density, "block") for i in range(len(sparse)))
    entries += sum(math.prod(s) for s in shapes if len(s) == 1)
    assert payload_entries(shapes, density, block) == entries
    assert payload_bytes(shapes, density, "bfloat16", block) == 2 * entries
    assert mask_bytes(shapes, density, replicas, block) == layout.wire_bytes(density, "block")


def test_a_wire_is_priced_by_its_messages() -> None:
    """128 entries to a block: 4 bits each and a scale of 2 bytes; a part of a block counts as a whole one."""
    assert coded_by("float32") is None and payload_bytes(SHAPES, 0.1) == 4 * payload_entries(SHAPES, 0.1)
    bfloat16 = coded_by("bfloat16")
    assert bfloat16 is not None and bfloat16(1000) == 2000
    for wire in FORMATS:
        coded = coded_by(wire)
        assert coded is not None and coded(1000) == coded(1024) == message_bytes(wire, 1024)
    assert payload_bytes(((8 * 1024, 1024),), 0.125, "int4") == 2**20 // 128 * 66
    assert (width("float32"), width("bfloat16")) == (4, 2)
    known = "float32, bfloat16, int8, int4, e2m1, e3m0, 2bit, 1bit"
    with pytest.raises(ValueError, match=f"'fp8'; it must be one of {known}"):
        coded_by("fp8")
    with pytest.raises(ValueError, match=r"'int4'; it must be one of float32, bfloat16$"):
        width("int4")


@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("model", ["llama_500m", "llama_1_8b"])
def test_optimizer_bytes_are_those_of_the_kernel_benchmark(model: str, density: float) -> None:
    shapes = list(get_workload(model).shapes())
    least = kernel_bytes(PlannedRun("scape", density), shapes, 8)  # as scripts/gpu/passes.py has it
    pack, rest = optimizer_bytes(PlannedRun("scape", density), shapes, 1)
    n = sum(map(math.prod, shapes))
    assert pack / n == pytest.approx(least["pack"] / n, abs=1e-4)
    assert (pack + rest) / n == pytest.approx(sum(least.values()) / n, abs=1e-4)
    assert (pack + rest) / n == pytest.approx({0.1: 27.54, 0.01: 25.03}[density], abs=0.005)  # docs/kernels.md


def test_kernel_bytes_by_hand() -> None:
    """1024 blocks, half of each sent, and no second replica: two masks are a quarter of a byte a parameter."""
    n, k = 1 << 20, 1 << 19
    found = kernel_bytes(PlannedRun("scape", 0.5), [(1024, 1024)], 1)
    assert found == {"finite": 4 * n, "pack": 12.25 * n + 8 * k, "squares": 8 * k, "update": 8.5 * n + 12 * k}


@pytest.mark.parametrize(
    ("model", "flavor", "count"), [("llama_500m", "500M", 513590784), ("llama_1_8b", "1.8B", 1831201280)]
)
def test_llama_shapes_are_those_that_torchtitan_builds(model: str, flavor: str, count: int) -> None:
    from torchtitan_scape.models.llama import LLAMA_ARGS, Llama

    with torch.device("meta"):
        built = Llama(LLAMA_ARGS[flavor])
    workload = get_workload(model)
    assert sorted(workload.shapes()) == sorted(tuple(p.shape) for p in built.parameters())
    assert workload.parameters == count


def test_gpt_is_gpt2_medium() -> None:
    """354,823,168 parameters, as in the published checkpoint (tied output), and 47 spare rows."""
    from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS

    workload = get_workload("gpt_345m")
    with torch.device("meta"):
        built = {name: tuple(p.shape) for name, p in GPT2(GPT2_ARGS["345M"]).named_parameters()}
    assert list(zip(workload.names(), workload.shapes(), strict=True)) == list(built.items())
    assert workload.parameters == 354823168 + 47 * 1024
    assert hidden_shapes(workload.shapes()) == [s for name, s in built.items() if "layers" in name and len(s) == 2]
    assert replace(workload, sequence=256).shapes() == workload.shapes()
    with pytest.raises(ValueError, match="gpt_345m has learned positions for 1024 tokens, and a sequence has 2048"):
        replace(workload, sequence=2048)


@given(st.sampled_from(sorted(WORKLOADS)), st.integers(1, 8))
def test_local_shapes_are_the_first_chunk(model: str, shard: int) -> None:
    for shape, local in zip(
        get_workload(model).shapes(), local_shapes(get_workload(model).shapes(), shard), strict=True
    ):
        assert local == tuple(torch.empty(shape, device="meta").chunk(shard)[0].shape)


def test_flops_are_six_a_parameter_and_token_and_the_causal_half_of_attention() -> None:
    """The products of Llama-1.8B counted one by one: 2 FLOPs a multiply-add, three times for forward and backward."""
    w = get_workload("llama_1_8b")
    matrices = 24 * (2 * 2560 * 2560 + 2 * 640 * 2560 + 3 * 2560 * 6912) + 32000 * 2560
    scores = 24 * 2 * 32 * 80 * 2048 / 2  # q k^T and p v; half of the keys on average
    assert w.flops_per_token() == pytest.approx(3 * 2 * (matrices + scores), rel=1e-4)


def test_powersgd_sends_its_factors() -> None:
    """Rank 4: both matrices are factored, the vector goes whole."""

    def sizes(method: PlannedRun) -> list[float]:
        return [message.nbytes for message in messages(method, SHAPES, 2)]

    method = PlannedRun("powersgd", rank=4)
    assert sizes(method) == [4 * 1000, 16 * (4096 + 1024), 16 * (1024 + 512)]
    # rows * columns of the smaller one are less than twice its factors at rank 171 and more: it goes whole
    assert sizes(PlannedRun("powersgd", rank=171))[0] == 4 * (1000 + 1024 * 512)
    budget = payload_bytes(SHAPES, 0.01)
    rank = powersgd_rank(SHAPES, budget)
    sums = [sum(sizes(PlannedRun("powersgd", rank=r))) for r in (rank, rank + 1)]
    assert sums[0] <= budget < sums[1]


def test_topk_sends_values_and_coded_offsets_and_reduces_what_is_whole() -> None:
    """METHODS: a gather of 5.1 bytes an entry selected, an all-reduce of the rest."""
    sparse, whole = messages(PlannedRun("topk", 0.01), SHAPES, 4)
    # Of every block of 1024 ten values and 85 bits of offsets: 6 low ones each, 25 for all of their high parts.
    assert (sparse.collective, sparse.nbytes) == ("gather", (40 + 11) * (4096 + 512))
    assert (whole.collective, whole.nbytes) == ("reduce", 4 * 1000)
    assert [m.collective for m in messages(PlannedRun("topk", 1.0), SHAPES, 4)] == ["reduce"]


def test_radius_sends_its_mask_and_now_and_then_all() -> None:
    """METHODS: R(4 (d n_c + n_u)) (1 - 1 / T) + R(4 n) / T, and a residual and a bit of each entry."""
    n, sparse = 4608 * 1024 + 1000, 4608 * 1024
    method = PlannedRun("radius", 0.4, selection="tensor", optimizer="adamw", interval=50)
    masked, whole = messages(method, SHAPES, 4)
    on_mask = round(0.4 * 4096 * 1024) + round(0.4 * 1024 * 512)
    assert (masked.nbytes, masked.share) == (4 * (on_mask + 1000), 0.98)
    assert (whole.nbytes, whole.share) == (4 * n, 0.02)
    sent = sum(stage.sent for message in (masked, whole) for stage in message.stages([("network", 4)]))
    assert sent == pytest.approx(6 * (0.98 * (on_mask + 1000) + 0.02 * n))
    *others, separate = messages(replace(method, clip_refresh="fresh"), SHAPES, 4)
    assert others == [masked, whole] and (separate.nbytes, separate.share) == (4 * sparse, 0.02)
    assert messages(PlannedRun("radius", 0.4), SHAPES, 4)[0].nbytes == 4 * (410 * 4608 + 1000)
    alone = simulated_memory_bytes(PlannedRun("adamw"), SHAPES, 1)
    assert simulated_memory_bytes(method, SHAPES, 1) == alone | {"residual": 4 * sparse, "masks": sparse / 8}
    own_of_two = {"gradients": 8 * n, "residual": 8 * sparse, "masks": sparse / 4}
    assert simulated_memory_bytes(method, SHAPES, 2) == alone | own_of_two
    # Less is moved where the mask is sparser and refreshes are rarer.
    settings = (PlannedRun("radius", d, interval=t) for d, t in ((0.4, 50), (0.1, 50), (0.1, 200)))
    moved = [optimizer_bytes(setting, SHAPES, 4)[1] for setting in settings]
    assert moved[0] > moved[1] > moved[2] > optimizer_bytes(PlannedRun("adams"), SHAPES, 4)[1]


def test_what_is_to_go_whole_is_not_compressed() -> None:
    """The second matrix, by its place: as if it had one dimension, though tiles take these, too."""
    flat = (SHAPES[0], (1024 * 512,), SHAPES[2])
    for method in (
        PlannedRun("radius", 0.4),
        PlannedRun("topk", 0.01),
        PlannedRun("scape", 0.01),
        PlannedRun("scape", 0.01, "int4"),
    ):
        dense = replace(method, dense=(1,))
        assert messages(dense, SHAPES, 4) == messages(method, flat, 4) != messages(method, SHAPES, 4)
        assert simulated_memory_bytes(dense, SHAPES, 1) == simulated_memory_bytes(method, flat, 1)
    tiles, whole = messages(PlannedRun("topk", 0.01, selection="tile", dense=(1,)), SHAPES, 4)
    assert whole.nbytes == 4 * 1024 * 512
    assert [tiles] == messages(PlannedRun("topk", 0.01, selection="tile"), (SHAPES[0], SHAPES[2]), 4)


@pytest.mark.parametrize("kind", ["diloco", "streaming_diloco"])
def test_local_updates_send_all_once_in_a_round(kind: str) -> None:
    """METHODS: R(4 n) / H, and in a code the message of as many; anchor and outer momentum, on the host if asked."""
    n = 4608 * 1024 + 1000
    streaming = {"fragments": 4, "delay": 2} if kind == "streaming_diloco" else {}
    method = PlannedRun(kind, optimizer="adamw", inner_steps=30, **streaming)
    sent = [stage.sent for message in messages(method, SHAPES, 4) for stage in message.stages([("network", 4)])]
    assert sum(sent) == pytest.approx(6 * n / 30) and len(sent) == method.fragments
    assert all(message.hidden == bool(streaming) for message in messages(method, SHAPES, 4))
    coded = messages(replace(method, wire="e2m1"), SHAPES, 4)
    sent = [stage.sent for message in coded for stage in message.stages([("network", 4)])]
    assert sum(sent) == pytest.approx(1.5 * 66 / 128 * n / 30, rel=1e-2)
    adamw = simulated_memory_bytes(PlannedRun("adamw"), SHAPES, 1)
    moved = {"displacements": 2.0 * n if streaming else 4.0 * n}
    kept = {"anchor": 4.0 * n, "outer momentum": 4.0 * n}
    w = get_workload("llama_500m")
    assert simulated_memory_bytes(method, SHAPES, 1) == adamw | kept | moved
    assert simulated_memory_bytes(method, SHAPES, 3) == {k: 3 * v for k, v in (adamw | kept | moved).items()}
    on_host = replace(method, offload=("anchor",), outer_momentum=0.0)
    assert host_bytes(on_host, SHAPES, 4) == {"anchor": 4.0 * n} and host_bytes(method, SHAPES, 4) == {}
    assert host_link_bytes(on_host, SHAPES, 4) == (0.0, pytest.approx(12 * n / 30))
    assert memory_bytes(on_host, w, 1, 4, 1).keys() & {"anchor", "outer momentum"} == set()


def test_parts_in_turn_are_a_part_in_every_step() -> None:
    """One bit and a BF16 scale a block, there and back: 1.125 bits of 32 an entry; beside AdamW the anchor, and of
    more than four replicas what is owed."""
    n = 4608 * 1024 + 1000
    method = PlannedRun("sparta", optimizer="adamw", wire="1bit", inner_steps=3, outer_momentum=0.0)
    sent = [stage.sent for message in messages(method, SHAPES, 4) for stage in message.stages([("network", 4)])]
    assert sum(sent) == pytest.approx(6 * n * 1.125 / 32 / 3, rel=1e-2)
    adamw = simulated_memory_bytes(PlannedRun("adamw"), SHAPES, 1)
    assert simulated_memory_bytes(method, SHAPES, 1) == adamw | {"anchor": 4.0 * n}
    for replicas, owner_error in ((4, {}), (5, {"owed": 20.0 * n})):
        own = {kind: replicas * nbytes for kind, nbytes in (adamw | {"anchor": 4.0 * n}).items()}
        assert simulated_memory_bytes(method, SHAPES, replicas) == own | owner_error


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_a_residual_comes_on_top_of_the_optimizer(kind: str) -> None:
    n, sparse = 4608 * 1024 + 1000, 4608 * 1024
    own = (40 + 11) * 4608 if kind == "topk" else 0  # every replica's message is with all
    for optimizer in ("adamw", "adams"):
        method = PlannedRun(kind, 0.01, rank=4, optimizer=optimizer)
        alone = simulated_memory_bytes(PlannedRun(optimizer), SHAPES, 1)
        one = alone | {"residual": 4 * sparse} | ({"messages": own} if own else {})
        assert simulated_memory_bytes(method, SHAPES, 1) == one
        # Of every replica a gradient, a residual, and all messages as they arrive; parameters and moments once.
        eight = simulated_memory_bytes(method, SHAPES, 8)
        own_of_eight = {"gradients": 32 * n, "residual": 32 * sparse} | ({"messages": 64 * own} if own else {})
        assert eight == alone | own_of_eight
        assert optimizer_bytes(method, SHAPES, 8)[1] > optimizer_bytes(PlannedRun(optimizer), SHAPES, 8)[1]


def test_quantized_gradients_go_in_chunks_and_leave_a_residual_of_all() -> None:
    """Tensors begin at blocks of their own. By hand."""
    method = PlannedRun("quantized", wire="e2m1", block=128)
    (message,) = messages(method, SHAPES, 4)
    # An eighth of 4608 * 1024 + 1024, filled up to whole blocks for each of four replicas.
    assert message.chunks == ((590336, 8),) and message.nbytes == 4 * 8 * 590336
    (outside,) = message.stages([("network", 4)])
    # A part has 1153 blocks of 64 bytes of codes and 2 of a scale, up to 16 bytes; three go out and come back.
    assert (outside.sent, outside.rounds) == (8 * 6 * 76112, 6)
    n, alone = 4608 * 1024 + 1000, simulated_memory_bytes(PlannedRun("adams"), SHAPES, 1)
    assert simulated_memory_bytes(method, SHAPES, 1) == alone | {"residual": 4 * n}
    assert simulated_memory_bytes(replace(method, feedback=False), SHAPES, 1) == alone
    held = [memory_bytes(replace(method, overlap=overlap), get_workload("llama_500m"), 1, 4, 1) for overlap in (0, 1)]
    assert held[1] == held[0] | {"chunks in flight": 2 * held[0]["residual"]}


@pytest.mark.parametrize(("wire", "values", "width"), [("float32", "bfloat16", 2), ("bfloat16", "float32", 4)])
def test_owners_get_the_payload_and_send_their_part_of_the_values(wire: str, values: str, width: int) -> None:
    entries = payload_entries(SHAPES, 0.01)
    payload, new, masks = messages(PlannedRun("scape", 0.01, wire, update="sharded", values=values), SHAPES, 4)
    assert (payload.collective, payload.nbytes, payload.wire) == ("scatter", 4 * entries, wire)
    assert (new.collective, new.nbytes, new.wire) == ("gather", width * entries / 4, "float32")
    assert masks.hidden and masks.nbytes == mask_bytes(SHAPES, 0.01, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "sgd"}, "no method 'sgd'"),
        ({"kind": "scape", "density": 0.0}, "density is 0.0"),
        ({"kind": "scape", "density": 0.1, "wire": "fp8"}, "'fp8'"),
        ({"kind": "powersgd"}, "rank of powersgd is 0"),
        ({"kind": "scape", "overlap": True}, "scape does not go out in chunks"),
        ({"kind": "scape", "update": "shared"}, "update is 'shared'"),
    ],
)
def test_methods_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlannedRun(**arguments)


def test_memory_counts_every_kind() -> None:
    """Vista, no shards: 4 bytes a parameter each for parameters, gradients and state; two masks of an eighth."""
    w = get_workload("llama_500m")
    n = w.parameters
    scape = memory_bytes(PlannedRun("scape", 0.01), w, 1, 64, 1)
    assert [scape[k] for k in ("parameters", "gradients", "state")] == [4 * n] * 3
    assert scape["masks"] == pytest.approx(n / 4 + n / 64 * 10 * 10 / 8 / 1024, rel=1e-3)
    assert scape["payload"] == 8 * payload_entries(w.shapes(), 0.01)
    gather = memory_bytes(PlannedRun("scape", 0.01, update="sharded", values="bfloat16"), w, 1, 64, 1)
    assert gather["state"] == pytest.approx(4 * n, rel=1e-3)
    assert gather["owned moments"] == gather["owned master"] == pytest.approx(4 * n / 64, rel=1e-3)
    assert gather["payload"] == scape["payload"] / 2 and gather["masks"] == scape["masks"]
    assert memory_bytes(PlannedRun("adamw"), w, 4, 16, 1)["state"] == pytest.approx(2 * n, rel=1e-3)


def test_what_is_offloaded_leaves_two_buffers() -> None:
    """On one of 4 ranks; a share of an owner among 64 is less than its buffers would be, and stays."""
    w = get_workload("llama_1_8b")
    n, largest = 4 * w.parameters, 4 * 32000 * 2560
    plain = memory_bytes(PlannedRun("scape", 0.01), w, 1, 4, 1)
    local = PlannedRun("scape", 0.01, weights="bfloat16", offload=("state", "master"))
    found, host = memory_bytes(local, w, 1, 4, 1), host_bytes(local, w.shapes(), 4)
    assert host == {"state": n, "master": n} and found["offload buffers"] == 4 * largest
    assert sum(plain.values()) - sum(found.values()) == n + n / 2 - 4 * largest
    assert host_link_bytes(local, w.shapes(), 4) == (2 * n, 4 * n)
    gather = PlannedRun("scape", 0.01, update="sharded", weights="bfloat16", offload=("state", "master"))
    assert set(host_bytes(gather, w.shapes(), 4)) == {"state", "owned master"}
    assert set(host_bytes(gather, w.shapes(), 64)) == {"state"}
    pack, rest = host_link_bytes(gather, w.shapes(), 4)
    assert pack == pytest.approx(2 * n, rel=1e-3) and rest == pytest.approx(2 * n / 4, rel=1e-3)
    assert memory_bytes(gather, w, 1, 64, 1)["owned master"] == pytest.approx(n / 64, rel=1e-3)
