"""Values of TorchTitan's keys that fail late there, or without the key's name."""

import pytest

from torchtitan_scape.config.library_checks import check_library_keys
from torchtitan_scape.config.parsing import parse

RECIPE = ["--job.config_file=train_configs/embedded.toml"]


def converters() -> set[str]:
    from torchtitan_scape.titan.components import model_converters

    return model_converters()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--activation_checkpoint.mode=memory_budget"],
            "mode = 'memory_budget' needs a compiled model; set --compile",
        ),
        (["--model.converters=foo"], "model.converters has 'foo'; known are .*quantize.linear.float8"),
        (["--experimental.custom_import=nosuch"], "experimental.custom_import = 'nosuch': Python finds no such module"),
        (["--experimental.custom_import=no.such.module"], "custom_import = 'no.such.module': Python finds no"),
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
        ["--model.converters=quantize.linear.float8"],
        ["--experimental.custom_import=json.decoder"],
        ["--training.seq_len=128", "--validation.no-enable"],
        ["--profiling.enable_profiling"],
    ],
)
def test_valid_values_pass(arguments: list[str]) -> None:
    check_library_keys(parse([*RECIPE, *arguments]), "cpu", converters)
