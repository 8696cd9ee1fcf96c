"""Invalid configuration or launch: an error of one line with the value, before anything is built."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import server
from torchtitan_scape.config.checks import check_config, import_custom, remarks
from torchtitan_scape.config.parsing import parse, resolve
from torchtitan_scape.config.recipes import load
from torchtitan_scape.models.registry import stage_modules
from torchtitan_scape.optimizers.registry import check_layout
from torchtitan_scape.planner.configured import saving_of
from torchtitan_scape.report.forecast import Forecast
from torchtitan_scape.topology.machines import SCHEMA, Links, get_machine
from torchtitan_scape.trainer.layout import layout_of
from torchtitan_scape.trainer.specs import register

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "--job.config_file=train_configs/embedded.toml"


def check(arguments: list[str]) -> None:
    config = parse([RECIPE, *arguments])
    check_config(config, "cpu")
    check_layout(config.optimizer.name, layout_of(config), config.sharding.levels.active)


@pytest.mark.parametrize(
    "toml, message",
    [
        ("[sync.scape]\ndensty = 0.1", "densty"),
        ("[snyc]\nmethod = 'dense'", "snyc"),
        ("[sync]\nmethod = 'gossip'", r"method = 'gossip'; it must be 'dense' \| 'scape'"),
        ("[sync.scape]\ndensity = 0", r"\[sync.scape\] density = 0; it must lie in \(0, 1\]"),
        ("[sync.scape]\ndensity = '0.1'", "density = '0.1'; it must be a number"),
        ("[sync.scape]\ndensity_warmup_steps = -5", "density_warmup_steps = -5"),
        ("[sync.scape]\ndensity_warmup_steps = 1.5", "density_warmup_steps = 1.5; it must be an integer"),
        ("[sync.scape]\nstaleness_scaling = 'yes'", "staleness_scaling = 'yes'; it must be bool"),
        ("[sync.scape]\nkeep_moment = 1.0", r"\[sync.scape\] keep_moment = 1.0: it was removed, delete it: with"),
        ("[sync.scape]\nwait_by = 'tensor'", r"\[sync.scape\] wait_by = 'tensor': it was removed, delete it"),
        ("[sync.scape]\nparameters = 'gather'", r"it is now update: .* and \"gather\" \"sharded\""),
        ("[sync.topk]\ndense_names = ['a']", r"\[sync.topk\] dense_names = .*: it was removed, delete it"),
        ("[sync.scape]\noffload = 'a'", "offload = 'a'; it must be a list of strings"),
        (
            "[sync.scape]\ncode = 'int3'",
            r"code = 'int3'; it must be 'float32' \| 'int8' \| 'int4' \| '2bit' \| '1bit'",
        ),
        (
            "[sync.scape]\nwire_dtype = 'int8'",
            r"wrong.toml: \[sync.scape\] wire_dtype is now code: set code = \"int8\"",
        ),
        (
            "[sync.scape]\nvalues = 'int8'",
            r"\[sync.scape\] values = 'int8': new values have the dtype of the weights",
        ),
        ("[sync.topk]\nvalues = '2bit'", r"\[sync.topk\] values is now code: set code = \"2bit\""),
        ("[sharding.tagc]\nindex = 'bits'", r"\[sharding.tagc\] index = 'bits': it was removed, delete it"),
        ("[sync.scape]\nchunk_bytes = 2", "chunk_bytes = 2; it must be 4 or more"),
        ("[topology]\nexchange = 'ring'", r"exchange = 'ring'; it must be 'hierarchical' \| 'flat'"),
        ("[sync]\nmax_skipped_steps = 0", "max_skipped_steps = 0"),
        ("[sync]\nconsistency_interval = -1", "consistency_interval = -1"),
        ('[sync]\non_inconsistency = "ignore"', "on_inconsistency = 'ignore'"),
        ("[topology]\nmachine = 'summit'", "machine = 'summit'.*'frontier'"),
        ("[topology]\nranks_per_node = -1", "ranks_per_node = -1"),
        ("[topology]\nsimulate_replicas = 0", r"simulate_replicas = 0; it must be 1 \(real replicas\) or more"),
        ("[observe]\nwindows = [[1, 10], [10, 5]]", r"windows = \[\[1, 10\], \[10, 5\]\]; they must not overlap"),
        ("[observe]\nwindows = [[20, 5], [0, 3]]", r"; each must be \[first step, number of steps\], both 1 or more"),
        ("[observe]\nwindows = [[1, 10, 3]]", r"\[observe\] windows = \[\[1, 10, 3\]\]; each must be"),
        ("[observe]\nwindows = [1, 10]", r"windows = \[1, 10\]; it must be a list of lists of integers"),
        ("[observe]\nhistograms = [0]", r"histograms = \[0\]; steps are counted from 1"),
        ("[observe]\ndensity = 0", r"density = 0; it must lie in \(0, 1\]"),
        ("[observe]\nnames = 'output.weight'", r"names = 'output.weight'; it must be a list of strings"),
    ],
)
def test_invalid_toml_raises_an_error_with_key_and_value(toml: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(toml + "\n")
    with pytest.raises(ValueError, match=message):
        parse([f"--job.config_file={path}"])


@pytest.mark.parametrize(
    "world, arguments, message",
    [
        (2, ["--checkpoint.last_save_in_hf"], r"last_save_in_hf = true writes.*run python -m torchtitan_scape.export"),
        (2, ["--checkpoint.initial_load_in_hf"], r"initial_load_in_hf = true.*torchtitan_scape.export import.*_path"),
        (2, ["--optimizer.name=AdamW"], r"name = 'AdamW' with \[sync\] method = 'scape', which supports 'AdamS'; set"),
        (2, ["--optimizer.name=Muon"], r"name = 'Muon' with \[sync\] method = 'scape', which supports 'AdamS'; set"),
        (
            4,
            ["--optimizer.name=Muon", "--sync.method=dense", "--parallelism.tensor_parallel_degree=2"],
            r"'Muon' with parallelism.tensor_parallel_degree = 2: .* whole or sharded by rows; use .*_shard_degree.* or"
            r" \[optimizer\] name = 'AdamW'",
        ),
        (
            4,
            [
                "--optimizer.name=Muon",
                "--sync.method=dense",
                "--parallelism.data_parallel_shard_degree=2",
                "--sharding.levels.weights=1",
                "--sharding.levels.gradients=2",
            ],
            r"name = 'Muon' with \[sharding.levels\]: it needs matrices",
        ),
        (2, ["--optimizer.name=Lion"], r"name = 'Lion' with \[sync\] method = 'scape', which supports 'AdamS'; set"),
        (
            2,
            ["--optimizer.name=Lion", "--sync.method=dense"],
            r"'AdamW' or 'AdamS' or 'Muon'.*; set \[optimizer\] name = 'AdamW'",
        ),
        (2, ["--topology.simulate_replicas=2", "--sync.scape.update=sharded"], r"= 2 with \[sync.scape\] update"),
        (2, ["--sync.overlap"], r"overlap = true with method = 'scape', .* or method = 'dense' or 'quantized'"),
        (3, ["--parallelism.data_parallel_shard_degree=2"], "3 ranks cannot be divided into shard 2"),
        (4, ["--parallelism.data_parallel_replicate_degree=2"], "makes 2 ranks, but 4 were started"),
        (2, ["--parallelism.data_parallel_shard_degree=-1"], "both -1"),
        (2, ["--parallelism.data_parallel_replicate_degree=0"], "replicate degree is 0"),
        (2, ["--topology.ranks_per_node=4"], "4 ranks per node, but only 2 ranks"),
        (4, ["--topology.ranks_per_node=3"], "4 ranks do not fill whole nodes of 3"),
        (2, ["--parallelism.expert_parallel_degree=2"], "expert_parallel_degree"),
        (2, ["--parallelism.context_parallel_degree=2"], "ring attention does not call the CPU's kernels"),
        (
            2,
            ["--parallelism.context_parallel_degree=2", "--sharding.weights_code=int8"],
            r"degree = 2 with \[sharding\], which",
        ),
        (2, ["--optimizer.early_step_in_backward"], "early_step_in_backward"),
        (2, ["--training.enable_cpu_offload"], "enable_cpu_offload"),
        (2, ["--training.max_norm=0"], "max_norm = 0.0; it must be positive: .* a large value"),
        (2, ["--training.dtype=bfloat16"], "small updates round to zero"),
        (2, ["--training.seq_len=0"], "seq_len = 0; it must be 1 or more"),
        (2, ["--training.local_batch_size=0"], "local_batch_size = 0; it must be 1 or more"),
        (2, ["--metrics.log_freq=0"], "log_freq = 0; it must be 1 or more"),
        (2, ["--validation.freq=0"], "freq = 0; it must be 1 or more"),
        (2, ["--training.global_batch_size=17"], "global_batch_size = 17 is not a multiple"),
        (2, ["--topology.simulate_replicas=4"], r"= 4 with 2 real replicas \(.*degree = -1 on 2 ranks.*NGPU=1"),
        (
            1,
            ["--topology.simulate_replicas=4", "--training.global_batch_size=48"],
            r"48 is not a multiple of local_batch_size 8 x 1 data-parallel ranks x 4 simulated replicas = 32",
        ),
        (2, ["--training.seq_len=255"], "seq_len = 255 must be a multiple of 2"),
        (2, ["--validation.seq_len=127"], r"\[validation\] seq_len = 127 must be a multiple of 2"),
        (
            4,
            ["--parallelism.tensor_parallel_degree=2", "--validation.seq_len=126"],
            r"\[validation\] seq_len = 126 must be a multiple of 4",
        ),
        (2, ["--profiling.enable_memory_snapshot", "--profiling.profile_freq=0"], "profile_freq = 0; it must be 1"),
        (2, ["--comm.mode=local_tensor"], "local_tensor"),
        (
            2,
            ["--observe.enable"],
            r"\[observe\] window \[10000, 100\] is after the run's 200 steps; set windows and",
        ),
        (2, ["--observe.enable", "--observe.windows=[[1,100]]"], "histogram at 1000 is after the run's 200 steps"),
        (2, ["--observe.windows=[[1,"], r"command line: \[observe\] windows = '\[\[1,'; it must be a list of lists"),
        (2, ["--observe.windows=[[1,true]]"], "it must be a list of lists of integers"),
    ],
)
def test_unsupported_combinations_raise_an_error(
    world: int, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))
    with pytest.raises(ValueError, match=message):
        check(arguments)


STAGES = ["--parallelism.pipeline_parallel_degree=2"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--sync.method=topk"],
            r"method = 'topk' is not.*; set 'dense' or 'scape' or 'quantized' or 'quantized_update' or 'sparta'$",
        ),
        (
            ["--sync.method=diloco"],
            r"\[sync\] method = 'diloco' is not supported with .*pipeline_parallel_degree = 2; set",
        ),
        (["--sync.method=dense", "--sync.overlap"], r"overlap = true is not supported with .*; set it to false"),
        (["--topology.simulate_replicas=4"], r"simulate_replicas = 4 is not supported with .* start real replicas"),
        (["--sharding.weights_code=int8"], r"\[sharding\] is not supported with .*; omit it"),
        (["--sharding.levels.weights=1", "--sharding.levels.gradients=2"], r"\[sharding\] is not supported with"),
        (["--observe.enable"], r"\[observe\] enable = true is not supported with"),
        (["--parallelism.context_parallel_degree=2"], "context_parallel_degree = 2 is not supported with"),
        (
            ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
            "'Interleaved1F1B' is not.*; set '1F1B' or 'GPipe'",
        ),
        (["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"], "schedule = 'ZBVZeroBubble' is not supported"),
        (["--parallelism.pipeline_parallel_schedule=1f1c"], "schedule = '1f1c' is not supported with"),
        (["--model.converters=quantize.linear.float8"], r"converters = .* is not supported with .*; omit it"),
        (
            [
                "--parallelism.pipeline_parallel_degree=8",
                "--optimizer.name=Muon",
                "--training.local_batch_size=8",
                "--sync.method=dense",
            ],
            "'Muon': stage 0 has no layer",
        ),
        (["--parallelism.pipeline_parallel_schedule_csv=a.csv"], "schedule_csv = 'a.csv' is not supported with"),
        (
            ["--parallelism.pipeline_parallel_microbatch_size=3"],
            "microbatch_size = 3 and .* = 8 is not.* the size must",
        ),
        (["--parallelism.pipeline_parallel_microbatch_size=8"], "local batch into 2 micro-batches or more"),
        (["--parallelism.pipeline_parallel_microbatch_size=0"], "microbatch_size = 0 and"),
        (
            ["--validation.local_batch_size=4"],
            r"\[validation\] local_batch_size = 4 and \[training\] local_batch_size = 8",
        ),
        (["--validation.seq_len=128"], r"\[validation\] seq_len = 128 and \[training\] seq_len = 256 is not supported"),
        (["--validation.steps=-1"], r"\[validation\] steps = -1 is not supported with"),
        (["--model.name=gpt2", "--model.flavor=tiny"], r"degree = 2 with \[model\] name = 'gpt2': its output layer is"),
        (
            ["--model.flavor=study", "--parallelism.pipeline_parallel_degree=8"],
            "degree = 8 with 2 layers, of which .*: ",
        ),
        (["--parallelism.pipeline_parallel_degree=16"], "microbatch_size = 1 and .* 16 micro-batches or more"),
        (
            ["--parallelism.pipeline_parallel_layers_per_stage=3"],
            "layers_per_stage = 3 does not divide 6 layers into 2",
        ),
        (["--parallelism.pipeline_parallel_layers_per_stage=0"], "layers_per_stage = 0 does not divide"),
    ],
)
def test_settings_without_support_for_pipeline_stages_are_refused(arguments: list[str], message: str) -> None:
    config = parse([RECIPE, *STAGES, *arguments])
    with pytest.raises(ValueError, match=message):
        check_config(config, "cpu")
        register(config, with_data=False)


def test_a_division_into_stages_contains_every_module_once() -> None:
    config = parse([RECIPE, *STAGES])
    register(config, with_data=False)
    whole = ["tok_embeddings", *(f"layers.{i}" for i in range(6)), "norm", "output"]
    assert stage_modules(config, 6) == [whole[:4], whole[4:]]
    for given in ([whole[:3], whole[3:]], [whole[:8], whole[8:]]):
        config.parallelism.module_fqns_per_model_part = given
        assert stage_modules(config, 6) == given
    for given in ([whole[:3], whole[4:]], [whole], [whole, []], [whole[3:], whole[:3]], [whole[:4], whole[3:]]):
        config.parallelism.module_fqns_per_model_part = given
        with pytest.raises(
            ValueError, match=rf"part has {len(given)} lists; it must have 2 .*tok_embeddings, layers.0, "
        ):
            register(config, with_data=False)


def test_the_paper_rule_recipe_changes_only_the_rule() -> None:
    recipe, paper = (load(f"train_configs/{name}.toml").table for name in ("llama_500m", "llama_500m_paper_rule"))
    keys = ("density", "code", "staleness_scaling", "selection", "clip_mode")
    rule = {key: paper["sync"]["scape"].pop(key) for key in keys}
    assert list(rule.values()) == [0.1, "float32", False, "tensor", "literal"]
    assert [recipe["sync"]["scape"].pop(key) for key in keys] == [0.05, "int4", True, "block", "moment"]
    assert recipe.pop("job") != paper.pop("job")
    assert recipe == paper


def test_an_unreadable_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[sync\nmethod = ")
    with pytest.raises(ValueError, match=r"broken.toml is not valid TOML: .*line 1"):
        parse([f"--job.config_file={tmp_path}/broken.toml"])
    with pytest.raises(ValueError, match=r"none.toml cannot be read: No such file"):
        parse(["--job.config_file", f"{tmp_path}/none.toml"])


def test_ranks_per_node_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert layout_of(parse([RECIPE])).nodes == 2
    monkeypatch.setenv("NGPU", "64")
    dry = layout_of(parse([RECIPE, "--comm.mode=fake_backend", "--topology.machine=frontier"]))
    assert (dry.world_size, dry.ranks_per_node, dry.replicate) == (64, 8, 64)


def test_measured_links_replace_those_of_the_preset(tmp_path: Path) -> None:
    """For predictions and for every decision that depends on links; levels that were not measured stay."""
    path = tmp_path / "links.json"
    measured = {"network": {"latency": 3e-5, "bandwidth": 3.5e9}}
    path.write_text(json.dumps({"schema": SCHEMA, "levels": measured, "memory_bandwidth": 1e12}))
    batch = "--training.global_batch_size=8"
    config = parse([RECIPE, batch, "--topology.machine=vista", f"--topology.links={path}"])
    machine = layout_of(config).machine
    links = Links.from_machine(machine)
    assert (links["network"].bandwidth, links["network"].latency) == pytest.approx((3.5e9, 3e-5))
    assert links["node"] == Links.from_machine(get_machine("vista"))["node"] and not links.nominal
    assert "predicted on vista (measured)" in Forecast.of(config, layout_of(config)).line()
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"\[topology\] links: links cannot be read from .*; run .*--output` again"):
        layout_of(config)


def test_a_cache_folder_that_cannot_be_created_is_named() -> None:
    """PyTorch creates it while it is imported, before the trainer runs."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/dev/null/cache"}
    command = [sys.executable, "-m", "torchtitan_scape.train", RECIPE]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 2 and "'/dev/null/cache'; set TORCHINDUCTOR_CACHE_DIR or TMPDIR" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_starting_without_a_launcher_names_the_script() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
    result = server.run("torchtitan_scape.train", RECIPE, environment=environment)
    assert result.returncode == 2 and "start the trainer with ./run_train.sh" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "method, interval, steps",
    [
        ("diloco", "inner_steps", 30),
        ("streaming_diloco", "inner_steps", 31),
        ("co2", "inner_steps", 60),
        ("sparta", "interval", 30),
        ("noloco", "inner_steps", 30),
    ],
)
def test_a_run_shorter_than_one_round_gives_a_warning(method: str, interval: str, steps: int) -> None:
    arguments = [RECIPE, f"--sync.method={method}", f"--sync.{method}.{interval}=30", "--optimizer.name=AdamW"]
    assert not remarks(parse([*arguments, f"--training.steps={steps}"]))
    arguments += [f"--training.steps={steps - 1}"]
    (message,) = remarks(parse(arguments))
    assert f"steps = {steps - 1} with [sync] method = '{method}'" in message and "flush_at_end" in message
    assert not remarks(parse([*arguments, "--sync.flush_at_end"]))
    assert not remarks(parse([RECIPE, "--training.steps=1"]))


def test_a_schedule_shorter_than_the_run_gives_a_warning() -> None:
    arguments = [RECIPE, "--optimizer.lr=2e-3", "--lr_scheduler.warmup_steps=2", "--training.steps=10"]
    shorter = [*arguments, "--lr_scheduler.total_steps=5"]
    for more, rate in (["min_lr_factor=0.1"], "0.0002"), (["min_lr_factor=0"], "0"), (["decay_ratio=0"], "0.002"):
        (message,) = remarks(parse([*shorter, *(f"--lr_scheduler.{key}" for key in more)]))
        assert message.endswith(f"steps = 10: after step 5 the learning rate stays at {rate}")
    assert not remarks(parse([*arguments, "--lr_scheduler.total_steps=10"]))


def test_a_folder_with_checkpoints_without_their_switch_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-2").mkdir(parents=True)
    arguments = [RECIPE, f"--job.dump_folder={tmp_path}"]
    (message,) = remarks(parse(arguments))
    assert f"{tmp_path}/checkpoint has checkpoints, and [checkpoint] enable = false" in message
    assert not remarks(parse([*arguments, "--checkpoint.enable"]))


CASES = [("text_files", "text", "text/b.jsonl"), ("text_files", "text/a.jsonl", "text"), ("openwebtext", "", "")]


@pytest.mark.parametrize(("name", "trained", "validated"), CASES)
def test_validation_on_training_text_gives_a_warning(name: str, trained: str, validated: str) -> None:
    """A folder of text_files is read with all of its files, also those for validation."""

    def lines(name: str, validated: str, *more: str) -> list[str]:
        names = [f"--{section}.dataset={name}" for section in ("training", "validation")]
        paths = [f"--training.dataset_path={trained}", f"--validation.dataset_path={validated}"]
        return remarks(parse([RECIPE, *names, *paths, *more]))

    (message,) = lines(name, validated)
    assert f"dataset_path = {validated!r} reads text that is also trained on" in message
    assert not lines("prepared", validated) and not lines(name, validated, "--validation.no-enable")
    assert not lines(name, "/elsewhere/b.jsonl")


def test_arguments_of_unused_sections_give_a_warning() -> None:
    """Without it, a run with an interval and without the switch would save no checkpoint, and nothing would say so."""
    arguments = [RECIPE, "--checkpoint.interval=5", "--sync.topk.density=0.5", "--sync.scape.density=0.5"]
    assert resolve(arguments).unused() == [
        "--checkpoint.interval has no effect with [checkpoint] enable = false",
        "--sync.topk.density has no effect with [sync] method = 'scape'",
    ]
    assert resolve([*arguments, "--checkpoint.enable", "--sync.method=topk"]).unused() == [
        "--sync.scape.density has no effect with [sync] method = 'topk'"
    ]


def test_the_size_of_checkpoints_needs_valid_numbers() -> None:
    with pytest.raises(ValueError, match=r"\[checkpoint\] interval = 0; it must be 1 or more"):
        saving_of(parse([RECIPE, "--checkpoint.enable", "--checkpoint.interval=0"]))


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "custom_import = 'own_module' cannot be imported: ModuleNotFoundError"),
        ("import nosuch_package", "'own_module' cannot be imported: ModuleNotFoundError: No module named 'nosuch_pack"),
        ("raise RuntimeError('two\\nlines')", "'own_module' cannot be imported: RuntimeError: two lines; correct the"),
    ],
)
def test_a_custom_module_that_cannot_be_imported_is_named(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "own_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        import_custom(parse([RECIPE, "--experimental.custom_import=own_module"]))


@pytest.mark.parametrize("flavor", ["debugmodel_flex_attn", "debugmodel_varlen_attn"])
def test_attention_without_a_cpu_backward_pass_is_refused(flavor: str) -> None:
    config = parse([RECIPE, f"--model.flavor={flavor}"])
    register(config, with_data=False)  # a dry run builds it
    with pytest.raises(ValueError, match=f"flavor = '{flavor}' on a CPU: its .* attention cannot be trained there"):
        register(config, device_type="cpu")
