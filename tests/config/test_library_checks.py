"""Values of TorchTitan's keys that fail late there, or without the key's name."""

import pytest

from torchtitan_scape.config.checks import check_library_keys
from torchtitan_scape.config.parsing import parse

RECIPE = ["--job.config_file=train_configs/embedded.toml"]
FP8, EMULATED = "--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate"
GATHERED = "--quantize.linear.float8.enable_fsdp_float8_all_gather"
PRECOMPUTED = [FP8, EMULATED, GATHERED, "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"]
UPDATE = ["--sync.method=quantized_update", "--optimizer.name=Muon"]


def converters() -> set[str]:
    from torchtitan_scape.titan.components import model_converters

    return model_converters()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.converters=foo"], "model.converters has 'foo'; known are .*quantize.linear.float8"),
        (["--compile.enable", "--compile.backend=nonsense"], "compile.backend has 'nonsense'; known are .*inductor"),
        (["--compile.enable", "--compile.components=foo"], "compile.components has 'foo'; known are loss, model"),
        (["--profiling.enable_memory_snapshot"], "profiling.enable_memory_snapshot = true on a CPU"),
        (["--training.gc_debug"], "training.gc_debug = true on a CPU"),
        (["--training.seq_len=128"], "validation.seq_len = 256 is larger than training.seq_len = 128.*--validation"),
    ],
)
def test_wrong_values_name_key_and_fix(arguments: list[str], message: str) -> None:
    config = parse([*RECIPE, *arguments])
    with pytest.raises(ValueError, match=message):
        check_library_keys(config, "cpu", converters)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--compile.enable", "--activation_checkpoint.mode=memory_budget"],
        ["--compile.backend=nonsense"],  # not used
        ["--training.seq_len=128", "--validation.no-enable"],
        ["--profiling.enable_profiling"],
        [*PRECOMPUTED, *UPDATE],
    ],
)
def test_valid_values_pass(arguments: list[str]) -> None:
    check_library_keys(parse([*RECIPE, *arguments]), "cpu", converters)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.converters=quantize.grouped_mm.mx"], "grouped_mm.mx', is for MoE layers"),
        ([f"{FP8},quantize.linear.mx", EMULATED], "float8', and 1 more quantization: select one"),
        ([FP8, EMULATED, GATHERED, "--sharding.weights_code=int8"], r"all_gather = true and \[sharding\]"),
        (
            [FP8, EMULATED, GATHERED, "--sharding.levels.weights=1", "--sharding.levels.gradients=2"],
            r"all_gather = true and \[sharding\]",
        ),
        ([*PRECOMPUTED, "--sync.method=diloco", "--optimizer.name=AdamW"], "method 'diloco' validates with others"),
        ([*PRECOMPUTED, *UPDATE, "--sync.overlap"], "set precompute_float8_dynamic_scale_for_fsdp = false"),
    ],
)
def test_quantization_is_refused_with_the_fix(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_library_keys(parse([*RECIPE, *arguments]), "cpu", converters)


def test_float8_needs_an_amd_gpu_with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI250X reports the capability 9.0, which on CUDA is a Hopper GPU, and has no FP8."""
    config = parse([*RECIPE, FP8])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    check_library_keys(config, "cuda", converters)
    monkeypatch.setattr("torch.version.hip", "6.4")
    with pytest.raises(ValueError, match="float8', needs an MI300 or later"):
        check_library_keys(config, "cuda", converters)


def test_context_parallelism_with_flex_attention_needs_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.10 calls the attention with five positional arguments: TypeError at the first step."""
    from torchtitan_scape.trainer.specs import register

    config = parse([*RECIPE, "--parallelism.context_parallel_degree=2", "--model.flavor=debugmodel_flex_attn"])
    monkeypatch.setattr("torchtitan_scape.trainer.specs.FLEX_ON_PARTS", False)
    with pytest.raises(ValueError, match=r"flex attention; install torch 2\.11 or later") as info:
        register(config, with_data=False)
    assert "\n" not in str(info.value)
    monkeypatch.setattr("torchtitan_scape.trainer.specs.FLEX_ON_PARTS", True)
    register(config, with_data=False)
