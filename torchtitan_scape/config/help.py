"""The help of the command line: sections on one screen, and the keys of one section."""

import textwrap

from torchtitan_scape.config.reference import ConfigSection, sections

WIDTH = 100
USAGE = """\
usage: ./run_train.sh [--SECTION.KEY=VALUE ...]
       ./run_train.sh --help SECTION       keys of a section, for example sync.scape; "all" for all sections

Variables in front of it: CONFIG_FILE (recipe, or several with commas), NGPU (processes on this node).
Boolean keys take no value: --checkpoint.enable, --checkpoint.no-enable.

examples:
  ./run_train.sh --sync.method=sparta --optimizer.name=Muon
  CONFIG_FILE=train_configs/llama_500m.toml NGPU=4 ./run_train.sh --training.steps=1000
"""


def help_text(topic: str = "") -> str:
    """Return the help of all sections, of one section and those below it, or of "all".

    Raises:
        ValueError: there is no such section.
    """
    found = sections()
    if not topic:
        return f"{USAGE}\n{_overview(found)}"
    chosen = [one for one in found if topic == "all" or one.name == topic or one.name.startswith(f"{topic}.")]
    if not chosen:
        raise ValueError(
            f"--help {topic}: there is no such section; the sections are {', '.join(s.name for s in found)}"
        )
    return "\n".join(_section(one) for one in chosen)


def _overview(found: list[ConfigSection]) -> str:
    lines = []
    for title, own in (("sections of this project", True), ("sections of TorchTitan", False)):
        lines.append(f"{title}:")
        chosen = [one for one in found if one.is_own == own]
        if own:
            lines += [
                f"  {one.name:24}{textwrap.shorten(one.summary, WIDTH - 28, placeholder=' ...')}" for one in chosen
            ]
        else:
            names = ", ".join(one.name for one in chosen)
            lines += textwrap.wrap(names, WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines.append("")
    return "\n".join(lines)


def _section(section: ConfigSection) -> str:
    lines = [f"[{section.name}] {section.summary}"]
    for key in section.keys:
        default = f" (default {key.default})" if key.default else ""
        lines.append(f"  --{section.name}.{key.name}: {key.type}{default}")
        lines += textwrap.wrap(key.description, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"
