"""Cost of every method: compared with the kernels' block arithmetic and the models that TorchTitan builds."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_scape.core.workloads import WORKLOADS, LocalModel, get_workload, local_shapes
from torchtitan_scape.kernels.codec.formats import FORMATS, MessageSize, encoded_size
from torchtitan_scape.kernels.scape.blocks import BlockLayout
from torchtitan_scape.methods.local_options import DilocoOptions, StreamingDilocoOptions
from torchtitan_scape.methods.options import DenseOptions, MethodOptions, share_of_dense
from torchtitan_scape.methods.powersgd.options import PowersgdOptions, factor_entries
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.radius.options import RadiusOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.options import ScapeOptions, block_layout, payload_entries, sector_bytes
from torchtitan_scape.methods.sparta.options import SpartaOptions
from torchtitan_scape.methods.topk.options import TopkOptions
from torchtitan_scape.optimizers.cost import get_optimizer_cost
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.traffic import CollectiveCall, LevelSize

SHAPES = ((4096, 1024), (1024, 512), (1000,))
MODEL = LocalModel.of_shapes(SHAPES)
ADAMW, ADAMS = (PlannedRun(DenseOptions(), optimizer) for optimizer in ("AdamW", "AdamS"))


def calls(options: MethodOptions, replicas: int = 4, model: LocalModel = MODEL) -> list[CollectiveCall]:
    return options.collective_calls(model, [LevelSize("network", replicas)])


def sent(options: MethodOptions, replicas: int = 4, model: LocalModel = MODEL) -> list[float]:
    """Return the bytes of every stage."""
    levels = [LevelSize("network", replicas)]
    return [stage.sent for call in calls(options, replicas, model) for stage in call.stages(levels)]


shapes_of = st.lists(
    st.one_of(st.tuples(st.integers(1, 9000)), st.tuples(st.integers(1, 90), st.integers(1, 90))),
    min_size=1,
    max_size=8,
)


@given(shapes_of, st.sampled_from([0.5, 0.1, 0.03, 0.01, 0.001, 1.0]), st.integers(1, 9), st.sampled_from([64, 1024]))
def test_payload_and_mask_sizes_equal_those_of_the_kernels(
    shapes: list, density: float, replicas: int, block: int
) -> None:
    sparse = [math.prod(s) for s in shapes if len(s) > 1]
    layout = BlockLayout(tuple(sparse), block, replicas)
    entries = sum(layout.nnz(i, density, "block") for i in range(len(sparse)))
    entries += sum(math.prod(s) for s in shapes if len(s) == 1)
    assert payload_entries(shapes, density, block) == entries
    assert block_layout(shapes, replicas, block) == layout


def test_an_encoded_payload_costs_its_message_bytes() -> None:
    """A block of 128 entries has 4 bits per entry and a scale of 2 bytes; a partial block counts as a full one."""
    assert encoded_size("float32") is None
    for code in FORMATS:
        coded = encoded_size(code)
        assert coded is not None and coded(1000) == coded(1024) == MessageSize(code)(1024)
    (payload, _) = calls(ScapeOptions(density=0.125, code="int4"), 2, LocalModel.of_shapes([(8 * 1024, 1024)]))
    assert payload.message_bytes is not None and payload.message_bytes(payload.count) == 2**20 // 128 * 66
    known = "float32, int8, int4, e2m1, e3m0, 2bit, 1bit"
    with pytest.raises(ValueError, match=f"'fp8'; it must be one of {known}"):
        encoded_size("fp8")


@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("model", ["llama_500m", "llama_1_8b"])
def test_optimizer_traffic_equals_that_of_the_kernel_benchmark(model: str, density: float) -> None:
    whole, cost = get_workload(model).local(1), ScapeOptions(density=density)
    least = cost.pass_bytes(whole, 8)  # as in scripts/gpu/passes.py
    pack, rest = cost.memory_traffic(whole, 1)
    n = whole.entries
    assert pack / n == pytest.approx(least["pack"] / n, abs=1e-4)
    assert (pack + rest) / n == pytest.approx(sum(least.values()) / n, abs=1e-4)
    assert (pack + rest) / n == pytest.approx({0.1: 28.41, 0.01: 25.00}[density], abs=0.005)  # explanation/kernels.md


def test_kernel_traffic_computed_by_hand() -> None:
    """1024 blocks, half of each sent: two masks have a quarter of a byte per parameter.

    An owner's moments of the mask's entries are scattered: of 256 sectors of eight entries, one has no such entry.
    """
    n, k, model = 1 << 20, 1 << 19, LocalModel.of_shapes([(1024, 1024)])
    scattered = 4 * n * 255 / 256
    found = ScapeOptions(density=0.5).pass_bytes(model, 1)
    update = 8.375 * n + 14 * k
    assert found == {"finite": 4 * n, "pack": 12.25 * n + 16 * k, "squares": 8 * k, "update": update}
    # One of two owners: the moments for the norm, and for the update with the parameter; all parameters decay.
    sharded = ScapeOptions(density=0.5, update="sharded").pass_bytes(model, 2)
    assert sharded["squares and update"] == 12 * k / 2 + 4 * scattered / 2 + 0.25 * n + 4 * k + 8 * n
    # An FP32 master is read and written completely. BF16 weights change on the mask: 16 of them are a sector.
    weights = ScapeOptions(density=0.5, update="sharded", weights_dtype="bfloat16").pass_bytes(model, 2)
    written = 2 * n * (1 - 2**-16)
    expected = 12 * k / 2 + 3 * scattered / 2 + 0.25 * n + 4 * k + written + 8 * n / 2
    assert weights["squares and update"] == expected


@pytest.mark.parametrize(("density", "nbytes"), [(0.1, 4), (0.01, 4), (0.1, 2)])
def test_scattered_entries_move_whole_sectors(density: float, nbytes: int) -> None:
    """The sectors of a drawn mask, and those of a tensor without one."""
    rows, per = 2048, 32 // nbytes
    generator = torch.Generator().manual_seed(0)
    offsets = torch.rand(rows, 1024, generator=generator).topk(round(density * 1024), dim=1).indices
    used = torch.zeros(rows, 1024, dtype=torch.bool).scatter_(1, offsets, True)
    moved = 32 * int(used.view(-1, per).any(1).sum())
    assert sector_bytes([(rows, 1024), (100,)], density, nbytes) == pytest.approx(moved + nbytes * 100, rel=0.01)
    assert sector_bytes([(rows, 1024)], 1.0, nbytes) == nbytes * rows * 1024


@pytest.mark.parametrize(
    ("model", "flavor", "count"), [("llama_500m", "500M", 513590784), ("llama_1_8b", "1.8B", 1831201280)]
)
def test_llama_shapes_equal_those_of_torchtitan(model: str, flavor: str, count: int) -> None:
    from torchtitan_scape.models.llama import LLAMA_ARGS, Llama

    with torch.device("meta"):
        built = Llama(LLAMA_ARGS[flavor])
    workload = get_workload(model)
    assert sorted(workload.shapes()) == sorted(tuple(p.shape) for p in built.parameters())
    assert workload.parameters == count


def test_gpt_345m_has_the_shapes_of_gpt2_medium() -> None:
    """354,823,168 parameters, as in the published checkpoint (tied output), and 47 spare rows."""
    from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS

    workload = get_workload("gpt_345m")
    with torch.device("meta"):
        built = {name: tuple(p.shape) for name, p in GPT2(GPT2_ARGS["345M"]).named_parameters()}
    assert list(zip(workload.names(), workload.shapes(), strict=True)) == list(built.items())
    assert workload.parameters == 354823168 + 47 * 1024
    assert workload.whole().hidden_shapes == [s for name, s in built.items() if "layers" in name and len(s) == 2]
    assert replace(workload, sequence=256).shapes() == workload.shapes()
    with pytest.raises(ValueError, match="gpt_345m has learned positions for 1024 tokens, and a sequence has 2048"):
        replace(workload, sequence=2048)


@given(st.sampled_from(sorted(WORKLOADS)), st.integers(1, 8))
def test_local_shapes_are_those_of_the_first_rank(model: str, shard: int) -> None:
    for shape, local in zip(
        get_workload(model).shapes(), local_shapes(get_workload(model).shapes(), shard), strict=True
    ):
        assert local == tuple(torch.empty(shape, device="meta").chunk(shard)[0].shape)


def test_flops_are_six_per_parameter_and_token_plus_causal_attention() -> None:
    """Sum over all products of Llama-1.8B: 2 FLOPs per multiply-add, three times for forward and backward."""
    w = get_workload("llama_1_8b")
    matrices = 24 * (2 * 2560 * 2560 + 2 * 640 * 2560 + 3 * 2560 * 6912) + 32000 * 2560
    scores = 24 * 2 * 32 * 80 * 2048 / 2  # q k^T and p v; half of the keys on average
    assert w.flops_per_token() == pytest.approx(3 * 2 * (matrices + scores), rel=1e-4)


def test_powersgd_sends_its_factors() -> None:
    """Rank 4: both matrices are factored, the vector is sent uncompressed, together with all P."""
    assert [call.count for call in calls(PowersgdOptions(rank=4), 2)] == [1000 + 4 * (4096 + 1024), 4 * (1024 + 512)]
    # from rank 171 the factors of the smaller one have more than half its entries: it is sent uncompressed
    assert factor_entries(SHAPES, 171)[0] == 1000 + 1024 * 512


def test_topk_sends_values_and_offsets_and_reduces_the_others() -> None:
    """An all-gather of 5.1 bytes per selected entry, and an all-reduce of the uncompressed parameters."""
    sparse, whole = calls(TopkOptions(density=0.01))
    # Per block of 1024: ten values and 85 bits of offsets, 6 low bits each and 25 bits for all high parts.
    assert (sparse.kind, sparse.count) == ("all_gather", (40 + 11) * (4096 + 512))
    assert (whole.kind, whole.count) == ("all_reduce", 1000)
    assert [call.kind for call in calls(TopkOptions(density=1.0))] == ["all_reduce"]


def without_chunks(run: PlannedRun, replicas: int, model: LocalModel = MODEL) -> dict[str, float]:
    """Return the memory of simulated replicas, without what is recorded from a step."""
    kinds = run.simulated_memory(model, replicas)
    kinds.pop("chunks in flight", None)
    return kinds


def test_radius_sends_mask_entries_and_all_entries_at_a_refresh() -> None:
    """R(4 (d n_c + n_u)) (1 - 1 / T) + R(4 n) / T bytes; a residual and one bit per entry in memory."""
    n, sparse = 4608 * 1024 + 1000, 4608 * 1024
    options = RadiusOptions(density=0.4, interval=50)
    run = PlannedRun(options, "AdamW")
    masked, whole = calls(options)
    on_mask = round(0.4 * 4096 * 1024) + round(0.4 * 1024 * 512)
    assert masked.share == 0.98 and 0 <= masked.count - (on_mask + 1000) < 8
    assert (whole.count, whole.share) == (n, 0.02)
    assert sum(sent(options)) == pytest.approx(6 * (0.98 * masked.count + 0.02 * n))
    alone = ADAMW.simulated_memory(MODEL, 1)
    assert run.simulated_memory(MODEL, 1) == alone | {"residual": 4 * sparse, "masks": sparse / 8}
    own_of_two = {"gradients": 8 * n, "residual": 8 * sparse, "masks": sparse / 4}
    assert without_chunks(run, 2) == alone | own_of_two
    moved = [PlannedRun(RadiusOptions(density=d)).memory_traffic(MODEL, 4)[1] for d in (0.4, 0.1)]
    assert moved[0] > moved[1] > ADAMS.memory_traffic(MODEL, 4)[1]


@pytest.mark.parametrize("selection, lists", [("block", True), ("tensor", False)])
def test_only_kernels_have_lists_of_the_mask(selection: Literal["block", "tensor"], lists: bool) -> None:
    """Selection "tensor" runs in PyTorch. Positions of two bytes of the entries of two masks, on every replica."""
    cost = ScapeOptions(density=0.01, selection=selection)
    expected = 2.0 * 2 * (10 * 4608 + 1000) if lists else 0.0  # ten of each block of 1024, and the vector
    assert cost.held_memory(MODEL, 4)["mask lists"] == expected
    assert PlannedRun(cost).simulated_memory(MODEL, 4)["mask lists"] == 4 * expected


LAYERS = LocalModel(("tok_embeddings.weight", "layers.0.w", "layers.1.w", "layers.2.w"), ((1024, 512),) * 4)


@pytest.mark.parametrize("section", [DilocoOptions, StreamingDilocoOptions])
def test_local_updates_send_all_once_per_round(section: type[DilocoOptions | StreamingDilocoOptions]) -> None:
    """R(4 n) / H bytes, or the size of the encoded message; anchor and outer momentum, optionally on the host."""
    n, streaming = 4 * 1024 * 512, section is StreamingDilocoOptions
    more = {"fragments": 4, "delay": 2} if streaming else {}
    options = section(inner_steps=30, code="float32", **more)  # type: ignore[arg-type]
    run = PlannedRun(options, "AdamW")
    assert sum(sent(options, model=LAYERS)) == pytest.approx(6 * n / 30)
    assert len(calls(options, model=LAYERS)) == (4 if streaming else 1)
    assert all(call.hidden == streaming for call in calls(options, model=LAYERS))
    coded = sent(replace(options, code="e2m1"), model=LAYERS)
    assert sum(coded) == pytest.approx(1.5 * 66 / 128 * n / 30, rel=1e-2)
    adamw = ADAMW.simulated_memory(LAYERS, 1)
    moved = {"displacements": 2.0 * n if streaming else 4.0 * n}
    kept = {"anchor": 4.0 * n, "outer momentum": 4.0 * n}
    assert run.simulated_memory(LAYERS, 1) == adamw | kept | moved
    assert without_chunks(run, 3, LAYERS) == {k: 3 * v for k, v in (adamw | kept | moved).items()}
    on_host = PlannedRun(replace(options, host=True, outer_momentum=0.0), "AdamW")
    assert on_host.options.host_memory(LAYERS, 4) == {"anchor": 4.0 * n} and options.host_memory(LAYERS, 4) == {}
    assert on_host.options.host_link_traffic(LAYERS, 4) == (0.0, pytest.approx(12 * n / 30))
    assert on_host.total_memory(get_workload("llama_500m"), 1, 4, 1).keys() & {"anchor", "outer momentum"} == set()


def test_sparta_sends_a_block_group_in_every_step() -> None:
    """One bit and a BF16 scale per block, there and back: 1.125 bits of 32 per entry; besides AdamW the anchor, and
    with more than four replicas the owner's error."""
    n, options = 4608 * 1024 + 1000, SpartaOptions(interval=3, code="1bit")
    run = PlannedRun(options, "AdamW")
    assert sum(sent(options)) == pytest.approx(6 * n * 1.125 / 32 / 3, rel=1e-2)
    adamw = ADAMW.simulated_memory(MODEL, 1)
    assert run.simulated_memory(MODEL, 1) == adamw | {"anchor": 4.0 * n}
    for replicas, owner_error in ((4, {}), (5, {"owner_error": 20.0 * n})):
        own = {kind: replicas * nbytes for kind, nbytes in (adamw | {"anchor": 4.0 * n}).items()}
        assert without_chunks(run, replicas) == own | owner_error


@pytest.mark.parametrize("options", [TopkOptions(density=0.01), PowersgdOptions(rank=4)])
def test_a_residual_is_added_to_the_memory_of_the_optimizer(options: MethodOptions) -> None:
    n, sparse = 4608 * 1024 + 1000, 4608 * 1024
    own = (40 + 11) * 4608 if isinstance(options, TopkOptions) else 0  # a replica stores the messages of all
    for dense in (ADAMW, ADAMS):
        run, alone = PlannedRun(options, dense.optimizer), dense.simulated_memory(MODEL, 1)
        one = alone | {"residual": 4 * sparse} | ({"messages": own} if own else {})
        assert run.simulated_memory(MODEL, 1) == one
        # Per replica a gradient, a residual and all received messages; parameters and moments once.
        own_of_eight = {"gradients": 32 * n, "residual": 32 * sparse} | ({"messages": 64 * own} if own else {})
        assert without_chunks(run, 8) == alone | own_of_eight
        assert run.memory_traffic(MODEL, 8)[1] > dense.memory_traffic(MODEL, 8)[1]


def test_quantized_gradients_are_sent_in_chunks_with_a_full_residual() -> None:
    """Tensors start a new block. Computed by hand."""
    options = QuantizedOptions(code="e2m1", block=128)
    run = PlannedRun(options)
    (call,) = calls(options)
    # An eighth of 4608 * 1024 + 1024, padded to whole blocks for each of four replicas.
    assert call.message_bytes.chunks == ((590336, 8),) and call.count == 8 * 590336  # type: ignore[union-attr]
    (outside,) = call.stages([LevelSize("network", 4)])
    # A slice has 1153 blocks with 64 bytes of codes and a scale of 2 bytes, padded to 16 bytes; three are sent and
    # three are returned. The latency of every chunk counts.
    assert (outside.sent, outside.rounds) == (8 * 6 * 76112, 8 * 6)
    n, alone = 4608 * 1024 + 1000, ADAMS.simulated_memory(MODEL, 1)
    assert run.simulated_memory(MODEL, 1) == alone | {"residual": 4 * n}
    assert PlannedRun(replace(options, error_feedback=False)).simulated_memory(MODEL, 1) == alone


@pytest.mark.parametrize(("code", "dtype", "nbytes"), [("float32", "bfloat16", 2), ("int8", "float32", 4)])
def test_owners_receive_the_payload_and_send_their_values(code: str, dtype: str, nbytes: int) -> None:
    options = ScapeOptions(density=0.01, code=code, update="sharded", weights_dtype=dtype)  # type: ignore[arg-type]
    payload, new, masks = calls(options)
    assert payload.kind == "reduce_scatter" and payload.count / 4 == new.count / nbytes
    assert 0 <= payload.count - payload_entries(SHAPES, 0.01) < 4 * 1024, "rows are as long as the longest"
    assert payload.message_bytes == encoded_size(code)
    assert (new.kind, new.message_bytes) == ("all_gather", None)
    assert masks.hidden and masks.count == block_layout(SHAPES, 4, 1024).wire_bytes(0.01, "block")


def test_impossible_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="no optimizer 'sgd'; known are AdamW"):
        PlannedRun(DenseOptions(), "sgd")
    with pytest.raises(ValueError, match="scape does not support overlap"):
        PlannedRun(ScapeOptions(), overlap=True)


@pytest.mark.parametrize("name", METHODS)
def test_the_registry_and_the_cost_agree(name: str) -> None:
    """The planner must not import a class, and therefore reads these facts from the options."""
    entry = METHODS[name]
    assert entry.options.method_name() == name
    assert set(entry.options.main_options) <= entry.options.__dataclass_fields__.keys()
    for optimizer in entry.optimizers:
        assert get_optimizer_cost(optimizer).traffic(MODEL) > 0
    assert 0 < share_of_dense(entry.options(), MODEL, 4) < 1.01


def test_memory_counts_every_kind() -> None:
    """Vista, no shards: 4 bytes per parameter each for parameters, gradients and state; two masks of 1/8 byte."""
    w = get_workload("llama_500m")
    n = w.parameters
    scape = PlannedRun(ScapeOptions(density=0.01)).total_memory(w, 1, 64, 1)
    assert [scape[k] for k in ("parameters", "gradients", "state")] == [4 * n] * 3
    assert scape["masks"] == pytest.approx(n / 4 + n / 64 * 10 * 10 / 8 / 1024, rel=1e-3)
    assert scape["payload"] == 8 * payload_entries(w.shapes(), 0.01)
    sharded = ScapeOptions(density=0.01, update="sharded", weights_dtype="bfloat16")
    gather = PlannedRun(sharded).total_memory(w, 1, 64, 1)
    assert gather["state"] == pytest.approx(4 * n, rel=1e-3)
    assert gather["owned moments"] == gather["owned master"] == pytest.approx(4 * n / 64, rel=1e-3)
    assert gather["payload"] == scape["payload"] / 2 and gather["masks"] == scape["masks"]
    assert ADAMW.total_memory(w, 4, 16, 1)["state"] == pytest.approx(2 * n, rel=1e-3)


def test_offloaded_states_leave_three_buffers() -> None:
    """On one of 4 ranks. An owner's moments and master stay on the device."""
    w = get_workload("llama_1_8b")
    n, largest = 4 * w.parameters, 4 * 32000 * 2560
    plain, model = PlannedRun(ScapeOptions(density=0.01)).total_memory(w, 1, 4, 1), w.local(1)
    options = ScapeOptions(density=0.01, offload=["state"])
    local = PlannedRun(options)
    found, host = local.total_memory(w, 1, 4, 1), options.host_memory(model, 4)
    assert host == {"state": n} and found["offload buffers"] == 3 * largest
    assert sum(plain.values()) - sum(found.values()) == n - 3 * largest
    whole = 4 * sum(math.prod(shape) for shape in model.shapes if len(shape) < 2)
    assert options.host_link_traffic(model, 4) == (2 * n, 2 * whole)
    gather = PlannedRun(replace(options, update="sharded", weights_dtype="bfloat16"))
    assert set(gather.options.host_memory(model, 4)) == set(gather.options.host_memory(model, 64)) == {"state"}
    pack, rest = gather.options.host_link_traffic(model, 4)
    assert pack == pytest.approx(2 * n, rel=1e-3) and rest == 0
    assert gather.total_memory(w, 1, 64, 1)["owned master"] == pytest.approx(n / 64, rel=1e-3)
