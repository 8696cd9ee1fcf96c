"""The command `torchtitan-scape`."""

import argparse
import os
import platform
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version

from torchtitan_scape import __version__
from torchtitan_scape.core.command import PROJECT, end_in_one_line

# Module and purpose of every command. `torchtitan-scape NAME ...` is `python -m MODULE ...`.
COMMANDS = {
    "train": ("torchtitan_scape.start", "train on the processes of this node, by default the embedded recipe"),
    "plan": ("torchtitan_scape.planner.plan", "recommend a method and a layout"),
    "doctor": ("torchtitan_scape.doctor", "check packages, devices, network, folder, clocks and links of all nodes"),
    "prepare": ("torchtitan_scape.data.prepare", "convert text to tokens"),
    "export": ("torchtitan_scape.export", "convert a checkpoint to a Hugging Face folder, and back"),
    "evaluate": ("torchtitan_scape.evaluate", "score an exported model"),
}


def versions() -> str:
    """Return the version of the project and of the packages on which a run depends."""
    version_texts = [f"{PROJECT} {__version__}", f"Python {platform.python_version()}"]
    for package in ("torch", "torchtitan", "triton"):
        try:
            version_texts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            version_texts.append(f"no {package}")
    return ", ".join(version_texts)


def main() -> None:
    """Run a command. Its arguments are those after its name."""
    sys.excepthook = end_in_one_line
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        name = sys.argv.pop(1)
        sys.path.insert(0, os.getcwd())  # as with `python -m`, for modules that a recipe names
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
        return
    commands = "\n".join(f"  {name:10} {purpose}" for name, (_, purpose) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        PROJECT,
        description=f"commands:\n{commands}\n\n{PROJECT} COMMAND --help prints the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{PROJECT} COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=versions(), help="print the versions")
    parser.parse_known_args(sys.argv[1:2])  # ends with --version and --help
    given = f"{sys.argv[1]!r} is not a command" if sys.argv[1:] else "no command is given"
    parser.error(f"{given}; commands are {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
