"""The planner: recommendations for cases with a known answer, and errors for invalid input."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.options import DenseOptions, MethodOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.planner import candidates as planner_candidates
from torchtitan_scape.planner import plan
from torchtitan_scape.planner.candidates import (
    COMPARED,
    COMPRESSED,
    DENSE,
    NEAR_FASTEST,
    PlanRequest,
    _predict,
    advise,
    best,
    break_even_bandwidth,
    by_nodes,
    candidates,
    make_request,
)
from torchtitan_scape.planner.plan import main, report
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Assumptions, Prediction, predict
from torchtitan_scape.topology.machines import Links
from torchtitan_scape.topology.traffic import LevelSize, stage_seconds

FRONTIER = ("--machine", "frontier", "--nodes", "48", "--model", "llama_1_8b")
SLOW = ("--network-bandwidth", "1.25")  # one tenth of the nominal bandwidth


def on_slow_vista(gigabytes: float = 3.5, **changes: int) -> PlanRequest:
    return make_request("vista", 64, "llama_1_8b", network_bandwidth=gigabytes, **changes)


def test_slow_links_need_compression_and_fast_ones_do_not() -> None:
    slow, fast = advise(on_slow_vista(3.5)), advise(on_slow_vista(5000.0))
    assert slow.compress and slow.gain > 4 and slow.choice.method in COMPRESSED
    assert not fast.compress and fast.choice.method.name == "muon overlap"


def test_the_gain_at_the_break_even_bandwidth_is_three_percent() -> None:
    case = on_slow_vista()
    advice = advise(case)
    bandwidth = break_even_bandwidth(case, advice)
    assert 3.5e9 < bandwidth < 5e12
    for factor, above in ((0.9, True), (1.1, False)):
        links = case.links.with_bandwidth("network", factor * bandwidth)
        steps = [
            predict(
                c.method, case.workload, c.layout, links, batch=case.batch, micro_batch=c.micro_batch,
                assumptions=case.assumptions,
            ).step
            for c in (advice.dense, advice.compressed)
        ]  # fmt: skip
        assert (steps[0] / steps[1] > 1.03) is above


@pytest.mark.parametrize(
    ("nodes", "gigabytes", "name"),
    [
        (16, 3.5, "quantized"),
        (64, 3.5, "quantized_update"),
        (4, 0.0125, "sparta"),  # up to four replicas
        (16, 0.0125, "quantized_update"),
    ],
)
def test_the_first_of_the_nearly_fastest_is_recommended(nodes: int, gigabytes: float, name: str) -> None:
    """SCAPE is faster in all these cases."""
    case = make_request("vista", nodes, "llama_1_8b", network_bandwidth=gigabytes)
    allowed = COMPRESSED if nodes <= 4 else COMPRESSED[:-1]
    steps = {m: best(case, [m]).prediction.step for m in allowed}
    taken = advise(case).compressed.method
    assert taken.options.method_name() == name
    limit = NEAR_FASTEST * min(steps.values())
    assert taken == next(m for m in allowed if steps[m] <= limit)
    scape = [m for m in COMPARED if m.options.method_name() == "scape"]
    assert min(best(case, [m]).prediction.step for m in scape) < steps[taken]


@pytest.mark.parametrize("nodes", [16, 24, 28, 48])
def test_a_method_that_gains_is_not_hidden_by_one_that_does_not(nodes: int) -> None:
    """On Frontier, quantized gradients are slower than dense ones, and quantized updates faster from 24 nodes on."""
    case = make_request("frontier", nodes, "llama_1_8b")
    advice, dense = advise(case), best(case, DENSE).prediction.step
    gains = [dense / best(case, [m]).prediction.step for m in COMPRESSED[:3]]
    assert gains[0] < 1.0 and advice.compress is (max(gains) >= 1.03) is (nodes >= 24)


def test_one_replica_has_nothing_to_compress() -> None:
    """A single rank has no exchange."""
    case = make_request("vista", 1, "llama_500m")
    advice = advise(case)
    assert not advice.compress and advice.dense.prediction.exchange == 0
    assert break_even_bandwidth(case, advice) == 0


def test_all_shard_degrees_of_a_node_are_tried_if_they_fit() -> None:
    case = make_request("frontier", 48, "llama_1_8b")
    every = candidates(case, DENSE)
    assert {(c.method.optimizer, c.layout.shard) for c in every} == {("Muon", s) for s in (1, 2, 4, 8)}
    assert all(c.layout.replicate * c.layout.shard == 384 for c in every)
    # Little memory: the 22 GB of parameters, gradients and state must be sharded.
    small = replace(case, assumptions=Assumptions(usable_memory=0.3))
    assert all(c.memory > small.capacity for c in candidates(small, DENSE) if c.layout.shard == 1)
    found = best(small, DENSE)
    assert found.layout.shard > 1 and found.memory <= small.capacity
    with pytest.raises(ValueError, match=r"llama_1_8b needs \d+ GB a rank at least"):
        best(replace(case, assumptions=Assumptions(usable_memory=0.01)), DENSE)


@pytest.fixture
def without_quantized_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many replicas the other methods need as little memory as dense training."""
    for module in (planner_candidates, plan):
        monkeypatch.setattr(module, "COMPRESSED", COMPRESSED[:1])


@pytest.mark.usefixtures("without_quantized_update")
def test_a_method_that_does_not_fit_is_excluded_and_reported() -> None:
    case = make_request("vista", 64, "llama_1_8b", network_bandwidth=3.5, assumptions=Assumptions(usable_memory=0.335))
    coded = min(candidates(case, COMPRESSED[:1]), key=lambda c: c.memory)
    advice = advise(case)
    assert not case.fits(coded) and case.fits(advice.dense) and advice.compressed is None and not advice.compress
    (line,) = [one for one in report(case) if one.startswith(coded.method.name)]
    assert line.endswith(f"does not fit: {coded.memory / 1e9:.1f} GB a rank at least")
    with pytest.raises(ValueError, match="a rank at least"):
        advise(replace(case, assumptions=Assumptions(usable_memory=0.01)))


@pytest.mark.parametrize(
    ("nodes", "parameters", "dense", "compressed"),
    [
        (64, "5.5e9", "muon", "quantized_update"),  # dense training needs 95 GB with overlap, 73 GB without
        (64, "7e9", None, "quantized_update"),
        (2, "6.9e9", "muon", None),
    ],
)
def test_what_fits_is_advised(
    nodes: int, parameters: str, dense: str | None, compressed: str | None, capsys: pytest.CaptureFixture
) -> None:
    """A rank of Vista has 91.7 GB to use. The planner said that these models do not fit."""
    given = ["--machine", "vista", "--nodes", str(nodes), "--parameters", parameters]
    assert main([*given, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    for name, found in ((dense, answer["dense"]), (compressed, answer["compressed"])):
        assert (found and found["method"].split()[0]) == name and (not found or found["fits"])
    assert answer["compress"] is bool(compressed) and (answer["gain"] is None) is (dense is None)
    assert main(given) == 0
    said = capsys.readouterr().out
    expected = {
        (True, True): "Compress: yes. quantized_update .* with dense muon, 1.36 x",
        (False, True): "Compress: yes. quantized_update .* a step; dense training does not fit: 92.3 GB",
        (True, False): "Compress: no. Of the advised methods only dense muon fits",
    }
    assert re.search(expected[bool(dense), bool(compressed)], said)


def test_the_micro_batch_is_the_largest_divisor_that_fits() -> None:
    case = make_request("vista", 64, "llama_1_8b")  # 16 sequences per rank, with 3.1 GB each
    assert best(case, DENSE).micro_batch == 8
    for candidate in candidates(replace(case, assumptions=Assumptions(usable_memory=0.37)), DENSE[:1]):
        assert candidate.micro_batch in (1, 2) and candidate.memory <= 0.37 * 101.9e9


def test_changes_of_the_weights_hide_behind_a_forward_pass() -> None:
    run = PlannedRun(QuantizedUpdateOptions(), "Muon")
    for bandwidth in (None, 5000.0):
        case = on_slow_vista() if bandwidth is None else on_slow_vista(bandwidth)
        after = best(case, [run])
        during = _predict(case, after.layout, replace(run, overlap=True), after.micro_batch)
        micro_batches = case.batch // (case.ranks * after.micro_batch)
        backward = 2 / 3 * after.prediction.compute / micro_batches
        levels = [LevelSize("network", after.layout.replicate)]
        calls = run.options.collective_calls(case.workload.local(after.layout.shard), levels)
        kinds = {kind: [call for call in calls if call.kind == kind] for kind in ("reduce_scatter", "all_gather")}
        up, down = (
            sum(stage_seconds([stage for call in each for stage in call.slowest_stages(levels)], case.links))
            for each in kinds.values()
        )
        assert up > 0 and down > 0
        assert during.hidden == pytest.approx(min(up, backward) + min(down, backward / 2), rel=1e-6)
        assert during.exchange == pytest.approx(after.prediction.exchange - during.hidden, rel=1e-6)


@pytest.mark.parametrize("options", [DenseOptions(), QuantizedOptions()])
def test_overlap_hides_at_most_two_thirds_of_the_last_micro_batch(options: MethodOptions) -> None:
    def steps(case: PlanRequest) -> tuple[Prediction, Prediction, float]:
        after = best(case, [PlannedRun(options)])
        during = _predict(case, after.layout, PlannedRun(options, overlap=True), after.micro_batch)
        micro_batches = case.batch // (case.ranks * after.micro_batch)
        return after.prediction, during, 2 / 3 * after.prediction.compute / micro_batches

    after, during, backward = steps(on_slow_vista())
    hidden = min(after.exchange, backward)
    assert during.hidden == pytest.approx(hidden, rel=1e-3) and after.hidden == 0
    # The second pass of `quantized` reads its inputs again; `dense` copies all chunks, also those within one tensor.
    added = during.optimizer - after.optimizer
    assert added > 0.0 and after.step - during.step + added == pytest.approx(hidden, rel=1e-3)
    assert during.exchange == pytest.approx(max(0.0, after.exchange - backward), abs=1e-3)
    after, during, _ = steps(on_slow_vista(5000.0))
    # The step waits for the finite flag only.
    assert during.hidden == pytest.approx(after.exchange, rel=0.1) and during.exchange < 1e-3
    assert during.sent == after.sent


def test_only_the_default_batch_is_rounded_to_the_ranks() -> None:
    assert make_request("frontier", 48, "llama_1_8b").batch == 1152
    assert make_request("frontier", 48, "llama_1_8b", batch=384).batch == 384
    assert [batch % (n * 8) for n, batch, _ in by_nodes(make_request("frontier", 3, "llama_500m"))] == [0] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "laptop"], "no machine preset 'laptop'; known are vista, frontier"),
        (["--model", "gpt_9"], "no model 'gpt_9'; known are llama_500m"),
        (["--nodes", "0"], "0 nodes; there must be 1 or more"),
        (["--nodes", "1" + "0" * 20], "the planner takes at most 131072"),
        (["--layers", "100000", "--width", "64"], "--layers 100000; it must be positive and at most 10000"),
        (["--nodes", "-3"], "-3 nodes"),
        (["--nodes", "two"], "invalid int value: 'two'"),
        (
            ["--nodes", "48", "--machine", "frontier", "--global-batch", "1024"],
            "1024 sequences .* 384 ranks; take 1152",
        ),
        (["--network-bandwidth", "-1"], "bandwidth -1"),
        (["--mfu", "40"], "an MFU of 40.0; it must be in"),
        (["--links", "/nowhere/links.json"], "/nowhere/links.json"),
        (["--seq-len", "4000000"], "take a shorter --seq-len"),
    ],
)
def test_invalid_planner_input_exits_with_code_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert re.search(message, said.err)


def test_the_recommendation_for_48_nodes_of_frontier() -> None:
    """From the command line, without torch: neither the planner nor the registry imports it."""
    code = "import sys; from torchtitan_scape.planner.plan import main; assert main(sys.argv[1:]) == 0; "
    code += "import torchtitan_scape.methods.registry; assert 'torch' not in sys.modules"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, *FRONTIER, *SLOW], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for part in (
        "384 ranks (MI250X GCD, 68.7 GB), 1152 sequences of 2048 tokens",
        "Compress: yes. quantized_update 2bit, 1bit_unbiased with muon: ",
        "It sends the most of the advised methods within 10 % of the fastest",
        '[optimizer]\nname = "Muon"\nbeta1 = 0.95\n',
        '[sync]\nmethod = "quantized_update"\n[sync.quantized_update]\ncode = "2bit"\nupdate_code = "1bit_unbiased"\n',
        "data_parallel_replicate_degree = 48",
        "data_parallel_shard_degree = 8",
        "Memory a rank, estimated:",
        "Where compression would lose:",
    ):
        assert part in done.stdout


def test_a_reader_that_ends_early_causes_no_traceback() -> None:
    """As in `... | head`."""
    command = [sys.executable, "-m", "torchtitan_scape.planner.plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as planner:
        assert planner.stdout and planner.stderr
        planner.stdout.close()
        assert planner.stderr.read() == b""
    assert planner.returncode == 0


def test_nominal_links_need_overlap(capsys: pytest.CaptureFixture) -> None:
    assert main([*FRONTIER[:3], "8", *FRONTIER[4:]]) == 0
    said = capsys.readouterr().out
    for part in (
        "Compress: no. quantized e2m1 with muon overlap would lose",
        "Hidden behind compute: gradients, ",
        '[sync]\nmethod = "dense"\noverlap = true\n',
        "If ranks reach a tenth between nodes",
    ):
        assert part in said


def test_json_totals_equal_the_sums_of_their_parts(capsys: pytest.CaptureFixture) -> None:
    assert main([*FRONTIER, *SLOW, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["compress"] and answer["gain"] == pytest.approx(
        answer["dense"]["step"] / answer["compressed"]["step"]
    )
    assert len(answer["candidates"]) == 4 * (len(DENSE) + len(COMPRESSED) + len(COMPARED))
    for c in answer["candidates"]:
        assert c["replicate"] * c["shard_degree"] == answer["ranks"]
        assert c["step"] == pytest.approx(sum(c[k] for k in ("compute", "exchange", "shard", "optimizer", "fixed")))


def test_recommended_keys_exist_in_the_configuration() -> None:
    from torchtitan_scape.config.job_config import JobConfig
    from torchtitan_scape.planner.plan import report

    for case in (on_slow_vista(), on_slow_vista(5000.0)):
        section, seen = "", 0
        for line in report(case):
            if line.startswith("["):
                section = line.strip("[]")
            elif " = " in line and section:
                target = JobConfig()
                for name in section.split("."):
                    target = getattr(target, name)
                assert hasattr(target, line.split(" = ")[0]), (section, line)
                seen += 1
            elif not line:
                section = ""
        assert seen >= 7


def test_measured_links_replace_presets(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    links = {
        "schema": "topology.preflight/1",
        "memory_bandwidth": 1e12,
        "levels": {"network": {"latency": 1e-5, "bandwidth": 4e9, "residual": 0.1}},
    }
    path = tmp_path / "links.json"
    path.write_text(json.dumps(links))
    read = Links.from_json(path)
    assert read["network"].bandwidth == 4e9 and read["network"].latency == 1e-5
    assert main(["--nodes", "64", "--links", str(path)]) == 0
    said = capsys.readouterr().out
    assert "network 4 GB/s 10 us" in said and "memory bandwidth in the optimizer measured" in said
    assert "nominal" not in said
    case = make_request("vista", 64, "llama_1_8b", links=read)
    n = 1831201280
    copied = DenseOptions().memory_traffic(get_workload("llama_1_8b").local(1), 64)[1]
    assert best(case, [PlannedRun(DenseOptions())]).prediction.optimizer == pytest.approx((36 * n + copied) / 1e12)


def _of_network(link: str, memory: int = 1) -> str:
    return f'{{"schema": "topology.preflight/1", "levels": {{"network": {{{link}}}}}, "memory_bandwidth": {memory}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "topology.preflight/0"}', r"schema 'topology.preflight/0', expected 'topology.preflight/1'"),
        ("[]", "schema None"),
        ("not json", "links cannot be read from"),
        ('{"schema": "topology.preflight/1"}', "has no 'levels'"),
        (_of_network('"latency": 5e-6, "bandwidth": 0'), "the bandwidth of network is 0; it must be positive"),
        (_of_network('"latency": -5e-6, "bandwidth": 4e9'), "the latency of network is -5e-06; it must be"),
        (_of_network('"latency": 5e-6, "bandwidth": NaN'), "the bandwidth of network is nan"),
        (_of_network('"latency": 5e-6, "bandwidth": "4e9"'), "links cannot be read from .*'str'"),
        (_of_network('"latency": 0, "bandwidth": 4e9', -1), "the memory_bandwidth is -1; it must be positive"),
    ],
)
def test_an_invalid_preflight_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Links.from_json(path)
