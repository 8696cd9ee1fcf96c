"""The help of the command line: all sections on one screen, and the keys of one section."""

import os
import textwrap

from torchtitan_scape.config.reference import ConfigSection, group_summary, sections

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


def help_text(topic: str = "") -> str:
    """Return the help.

    Args:
        topic: a section, "all", or "" for the list of sections. A section that has only subsections prints these.

    Raises:
        ValueError: there is no such section.
    """
    found = sections()
    if not topic:
        return _overview(found)
    below = [one for one in found if one.name.startswith(f"{topic}.")]
    chosen = found if topic == "all" else [one for one in found if one.name == topic] or below
    if not chosen:
        raise ValueError(f"--help {topic}: the section is unknown; known are {', '.join(one.name for one in found)}")
    text = "\n\n".join(map(_section, chosen))
    if below and chosen != below:
        text += "\n\n" + _wrapped(f"Subsections: {', '.join(one.name for one in below)}", "")
    return text


def _overview(found: list[ConfigSection]) -> str:
    methods = [one for one in found if one.name.split(".")[0] == "sync"]
    own = [one for one in found if one.is_own and one not in methods]
    names = dict.fromkeys(one.name.split(".")[0] for one in found if not one.is_own)
    groups = {
        "synchronization of the replicas:": [(one.name, one.summary) for one in methods],
        "other sections of this project:": [(one.name, one.summary) for one in own],
        "sections of TorchTitan:": [(name, group_summary(name)) for name in names],
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
