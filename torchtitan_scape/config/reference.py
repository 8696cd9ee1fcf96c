"""Descriptions of all configuration keys, for `--help` and for docs/reference/configuration.md.

A key's description is the string literal after the field of its dataclass, in TorchTitan's sections as in this
project's. `python -m torchtitan_scape.config.reference > docs/reference/configuration.md` writes the page.
"""

import ast
import inspect
import json
import os
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.options import type_text

WIDTH = 80
_NAME_WIDTH = 24
_USAGE = """\
usage: {program} [--SECTION.KEY=VALUE ...]
--help SECTION prints the keys of a section, --help all those of all sections.
A boolean key takes no value: --checkpoint.enable or --checkpoint.no-enable.
examples:
  {program} --sync.method=sparta --optimizer.name=Muon
  CONFIG_FILE=train_configs/llama_500m.toml NGPU=4 {program}
  {program} --help sync.scape"""
_HEAD = """\
# Configuration

This page lists all keys of a recipe with their types, defaults and meanings. A recipe is a TOML file; the key `density`
of `[sync.scape]` is `--sync.scape.density=VALUE` on the command line. A boolean takes no value there:
`--checkpoint.enable` or `--checkpoint.no-enable`. `./run_train.sh --help sync.scape` prints one section.

Two marks describe the effect of a key on [loading a checkpoint](checkpoint_format.md#loading):

- *layout*: a checkpoint with another value is loaded by the rules for another layout. In `[sharding.tagc]`, residuals
  that were saved as `"exact"` are refused.
- *free*: a checkpoint does not record the value, and a run may resume with any other.

This page is generated: `python -m torchtitan_scape.config.reference > docs/reference/configuration.md`.
"""
# Sections of this project; the others are TorchTitan's.
OWN = ("sync", "topology", "sharding", "model.sizes", "checkpoint", "data", "observe")
_METHOD = "Method that synchronizes the replicas; its options are in the section [sync.METHOD]"
# TorchTitan's dataclasses have no summaries,
_TITAN = {
    "job": "Output folder, recipe and description of a run",
    "profiling": "Traces of the PyTorch profiler and memory snapshots",
    "metrics": "Log interval, TensorBoard and Weights & Biases",
    "model": "Model, its size and its tokenizer",
    "optimizer": "Optimizer and its hyperparameters",
    "lr_scheduler": "Warm-up and decay of the learning rate",
    "training": "Data, batch sizes, sequence length, steps, dtypes",
    "training.dataloader": "Not used here: a step's batches are read during the previous one, into pinned memory",
    "parallelism": "Degrees of the parallelism axes",
    "activation_checkpoint": "Activation checkpointing",
    "compile": "torch.compile",
    "quantize": "Low-precision matrix multiplication (FP8, MXFP8)",
    "quantize.linear.float8": "FP8 for nn.Linear",
    "quantize.linear.mx": "MXFP8 for nn.Linear",
    "quantize.grouped_mm.float8": "FP8 for the grouped matrix multiplications of MoE layers",
    "quantize.grouped_mm.mx": "MXFP8 for the grouped matrix multiplications of MoE layers",
    "comm": "Timeouts of collectives, flight recorder and dry runs",
    "memory_estimation": "TorchTitan's memory estimate, not used here",
    "fault_tolerance": "TorchFT, not supported here",
    "experimental": "Import of external modules",
    "validation": "Validation data and interval",
    "validation.dataloader": "Not used here",
    "debug": "Seed and deterministic algorithms",
}
# and these keys no descriptions, or one that is not true here.
_TITAN_KEYS = {
    "optimizer.beta1": "Decay of the first moment",
    "optimizer.beta2": "Decay of the second moment",
    "compile.backend": "Backend of torch.compile",
    "validation.steps": "Batches of each rank and simulated replica; -1 for all validation data, in equal shares",
}


@dataclass(frozen=True)
class Key:
    """One key of a section: its type in words, its default as TOML ("" for none), and the marks "layout" and "free"."""

    name: str
    type: str
    default: str
    description: str
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConfigSection:
    """A TOML section, such as "sync.scape", with its keys in the order of the dataclass."""

    name: str
    summary: str
    keys: tuple[Key, ...]

    @property
    def is_own(self) -> bool:
        return _own_rank(self.name) < len(OWN)


def sections() -> list[ConfigSection]:
    """Return all sections, those of this project first. Sections with subsections only are omitted."""
    all_sections = sorted(_sections(JobConfig, ""), key=lambda one: _own_rank(one.name))
    return [one for one in all_sections if one.keys or one.is_own]


def _own_rank(name: str) -> int:
    """Return the position in `OWN` of a section or of the section that contains it; len(OWN) for TorchTitan's."""
    return next((i for i, own in enumerate(OWN) if name == own or name.startswith(f"{own}.")), len(OWN))


def _sections(section: Any, path: str) -> Iterator[ConfigSection]:
    described = _descriptions(section)
    described |= {key.rpartition(".")[2]: text for key, text in _TITAN_KEYS.items() if key.rpartition(".")[0] == path}
    keys = [_key(f, described.get(f.name, "")) for f in fields(section) if not is_dataclass(f.type)]
    if path:
        yield ConfigSection(path, _summary(section, path), tuple(sorted(keys, key=lambda key: key.name != "method")))
    for field in fields(section):
        if is_dataclass(field.type):
            yield from _sections(field.type, f"{path}.{field.name}".lstrip("."))


def _key(field: "Field[Any]", description: str) -> Key:
    default = field.default if field.default is not MISSING else None
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if field.name == "method":  # declared at run time
        description = _METHOD
    marks = tuple(mark for mark in ("layout", "free") if field.metadata.get(mark))
    return Key(field.name, _type_text(field.type), "" if default is None else json.dumps(default), description, marks)


def _summary(section: Any, path: str) -> str:
    """Return the first paragraph of the class's docstring without the name of the section, as sentences."""
    text = _TITAN.get(path) or inspect.cleandoc(section.__doc__ or "").split("\n\n")[0]
    text = re.sub(r"^\[[\w.]+\]: ?", "", " ".join(text.split())).rstrip(".")
    return text if text.startswith("torch.") else f"{text[:1].upper()}{text[1:]}"


def _descriptions(section: Any) -> dict[str, str]:
    """Return the string literals after the fields, those of base classes included."""
    descriptions: dict[str, str] = {}
    for one in reversed(section.__mro__):
        if not is_dataclass(one):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cast(type, one)))).body[0]
        except (OSError, TypeError, IndentationError):  # declared at run time
            continue
        assert isinstance(tree, ast.ClassDef)
        for statement, after in zip(tree.body, tree.body[1:], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                descriptions[statement.target.id] = " ".join(after.value.value.split()).rstrip(".")
    return descriptions


def _type_text(declared: Any) -> str:
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Literal:
        return " or ".join(map(json.dumps, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_text(one) for one in arguments if one is not types.NoneType))
    return re.sub(r"\ban? ", "", type_text(declared)).replace("bool", "boolean")


def page() -> str:
    """Return docs/reference/configuration.md."""
    parts, title = [_HEAD], ""
    for section in sections():
        now = "Sections of this project" if section.is_own else "Sections of TorchTitan"
        if now != title:
            parts.append(f"## {now}\n")
            title = now
        parts.append(f"### {section.name}\n\n{section.summary}.\n")
        if section.keys:
            parts.append("".join(map(_entry, section.keys)))
    return "\n".join(parts)


def _entry(key: Key) -> str:
    allowed = re.sub(r'"[^"]*"', lambda value: f"`{value[0]}`", key.type)
    facts = [allowed, f"default `{key.default}`" if key.default else "not set", *(f"*{one}*" for one in key.marks)]
    return f"- `{key.name}` ({', '.join(facts)})" + (f": {key.description}.\n" if key.description else "\n")


def help_text(topic: str = "") -> str:
    """Return the help on a section, on "all" of them, or the list of sections. Raises ValueError for an unknown one.

    A section that has only subsections prints these.
    """
    all_sections = sections()
    if not topic:
        return _overview(all_sections)
    below = [one for one in all_sections if one.name.startswith(f"{topic}.")]
    chosen = all_sections if topic == "all" else [one for one in all_sections if one.name == topic] or below
    if not chosen:
        raise ValueError(
            f"--help {topic}: the section is unknown; known are {', '.join(one.name for one in all_sections)}"
        )
    text = "\n\n".join(map(_section, chosen))
    if below and chosen != below:
        text += "\n\n" + _wrapped(f"Subsections: {', '.join(one.name for one in below)}", "")
    return text


def _overview(all_sections: list[ConfigSection]) -> str:
    methods = [one for one in all_sections if one.name.split(".")[0] == "sync"]
    own = [one for one in all_sections if one.is_own and one not in methods]
    names = dict.fromkeys(one.name.split(".")[0] for one in all_sections if not one.is_own)
    groups = {
        "synchronization of the replicas:": [(one.name, one.summary) for one in methods],
        "other sections of this project:": [(one.name, one.summary) for one in own],
        "sections of TorchTitan:": [(name, _TITAN[name]) for name in names],
    }
    program = "./run_train.sh" if os.environ.get("SCAPE_CALLED_FROM") else "torchtitan-scape train"
    lines = [_USAGE.format(program=program)]
    for title, rows in groups.items():
        lines += [title, *(f"  {name:{_NAME_WIDTH}}{_shortened(summary)}" for name, summary in rows)]
    return "\n".join(lines)


def _shortened(summary: str) -> str:
    """Return the first sentence, as far as it fits into the line."""
    return textwrap.shorten(summary.partition(". ")[0], WIDTH - _NAME_WIDTH - 2, placeholder=" ...")


def _section(section: ConfigSection) -> str:
    lines = [_wrapped(f"[{section.name}] {section.summary}.", "")]
    for key in section.keys:
        default = f"default {key.default}" if key.default else "not set"
        lines.append(_wrapped(f"--{section.name}.{key.name}: {key.type}, {default}", "  ", "      "))
        if key.description:
            lines.append(_wrapped(f"{key.description}.", "      "))
    return "\n".join(lines)


def _wrapped(text: str, first: str, others: str | None = None) -> str:
    indent = first if others is None else others
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(page(), end="")
