"""Fields of option sections: validation, comparison between ranks, and documentation."""

import ast
import inspect
import itertools
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import pytest

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.config.resolved import values_of
from torchtitan_scape.core.options import FREE, LAYOUT, RENAMED_KEYS, Options
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.sharding.options import ShardingOptions


@dataclass
class Toy(Options):
    section: ClassVar[str] = "sync.toy"

    share: float = 0.5
    kind: Literal["a", "b"] = field(default="a", metadata=LAYOUT)
    names: list[str] = field(default_factory=list, metadata=LAYOUT)
    chunk: int = field(default=0, metadata=FREE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.share <= 1, "share", "it must lie in (0, 1]")


def test_field_metadata_determines_comparison_and_layout() -> None:
    one, other = Toy(names=["y", "x"], chunk=4), Toy(names=["x", "y"])
    assert one.fingerprint() == other.fingerprint() == {"share": 0.5, "kind": "a", "names": ["x", "y"]}
    assert one.layout() == {"kind": "a", "names": ["x", "y"]}


def test_invalid_values_raise_an_error_with_the_key() -> None:
    with pytest.raises(ValueError, match=r"^\[sync\.toy\] share = 2; it must lie in \(0, 1\]$"):
        Toy(share=2)
    with pytest.raises(ValueError, match=r"^\[sync\.toy\] kind = 'c'; it must be 'a' \| 'b'$"):
        Toy(kind="c")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^\[sync\.toy\] chunk = 1\.5; it must be an integer$"):
        Toy(chunk=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method, options, text",
    [
        ("topk", {"density": 0.0}, "[sync.topk] density = 0.0; it must lie in (0, 1]"),
        ("topk", {"density": "a"}, "[sync.topk] density = 'a'; it must be a number"),
        ("topk", {"block_size": 12}, "block_size = 12; it must be a multiple of 8"),
        ("topk", {"decay": 1.5}, "decay = 1.5; it must lie in"),
        ("topk", {"start": -1}, "start = -1; it must be 0 or more"),
        ("topk", {"selection": "model"}, "selection = 'model'; it must be 'block' | 'tensor' | 'tile'"),
        ("topk", {"code": "4bit"}, "code = '4bit'; it must be 'float32' | '2bit'"),
        ("tagc", {"density": 1.5}, "[sync.tagc] density = 1.5; it must lie in (0, 1]"),
        ("demo", {"beta": 0.0}, "beta = 0.0; it must lie in"),
        ("demo", {"chunk": 0}, "chunk = 0; it must be 1 to"),
        ("demo", {"k": 0}, "k = 0"),
        ("powersgd", {"rank": 0}, "[sync.powersgd] rank = 0; it must be 1 or more"),
        ("powersgd", {"start": -2}, "start = -2; it must be 0"),
        ("radius", {"density": 0.0}, "[sync.radius] density = 0.0; it must lie in (0, 1]"),
        ("radius", {"interval": 0}, "interval = 0; it must be 1 or more"),
        ("radius", {"start": -2}, "start = -2; it must be 0 or more, or -1 for one fifth of training.steps"),
        ("quantized", {"block": 48}, "[sync.quantized] block = 48; it must be a power of two from 32 to 1024"),
        ("onebit_adam", {"warmup_steps": 0}, "[sync.onebit_adam] warmup_steps = 0; it must be 1 or more, or -1"),
        ("onebit_adam", {"block": 48}, "block = 48; it must be a power of two from 32 to 1024"),
        ("sparseloco", {"decay": 0.0}, "[sync.sparseloco] decay = 0.0; it must lie in (0, 1]"),
        ("co2", {"momentum_clip": -1.0}, "[sync.co2] momentum_clip = -1.0; it must be 0 or more, with 0 for "),
        ("co2", {"inner_steps": 0}, "[sync.co2] inner_steps = 0; it must be 1 or more"),
        ("noloco", {"averaging_rate": 0.0}, "[sync.noloco] averaging_rate = 0.0"),
        ("noloco", {"outer_lr": 0.0}, "[sync.noloco] outer_lr = 0.0"),
        ("noloco", {"inner_steps": 0}, "[sync.noloco] inner_steps = 0"),
        ("noloco", {"outer_momentum": 1.0}, "[sync.noloco] outer_momentum = 1.0"),
    ],
)
def test_options_out_of_range_are_refused(method: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        METHODS[method].options(**options)


def test_scape_options_without_effect_are_not_compared() -> None:
    assert ScapeOptions(offload=["state"], chunk_bytes=8).fingerprint() == ScapeOptions().fingerprint()


def test_every_option_of_scape_has_a_docstring() -> None:
    """--help shows the docstring after a field."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(ScapeOptions)).body if isinstance(node, ast.ClassDef))
    explained = set()
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            explained.add(ast.unparse(node.target))
    assert explained == {f.name for f in fields(ScapeOptions)}


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--sync.scape.parameters=gather", 'it is now update: "local" is called "replicated"'),
        ("--sync.scape.no-wait-scaling", "sync.scape.wait_scaling is now .*: set --sync.scape.no-staleness_scaling"),
        ("--sync.scape.max_wait=3", "it was removed, delete it: the limit is always 1000"),
        ("--sync.scape.update_code=int4", "new values have the dtype of the weights: delete it, or set weights_dtype"),
        ("--sync.scape.wire=int4", "sync.scape.wire is now sync.scape.code: set --sync.scape.code=int4"),
        ("--sharding.levels.sum=int8", ".* is now sharding.levels.sum_code: set --sharding.levels.sum_code=int8"),
    ],
)
def test_a_renamed_key_on_the_command_line_names_the_new_key(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"command line: {argument}: {message}"):
        parse(["--job.config_file=train_configs/embedded.toml", argument])


def test_a_renamed_key_as_an_argument_of_python_names_the_new_key() -> None:
    """`__init__` of a dataclass would not."""
    for build in (lambda: ScapeOptions(wire="int4"), lambda: replace(ScapeOptions(), wire="int4")):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r'^\[sync.scape\] wire is now code: set code = "int4"$'):
            build()
    with pytest.raises(TypeError, match=r'^\[sharding\] weights is now weights_code: set weights_code = "int8"$'):
        ShardingOptions(weights="int8")  # type: ignore[call-arg]


def test_renamed_keys_are_keys_of_the_present_and_not_of_the_past() -> None:
    present = dict(values_of(JobConfig()))
    for section, names in RENAMED_KEYS.items():
        for earlier, name in names.items():
            assert f"{section}.{name}" in present and f"{section}.{earlier}" not in present
