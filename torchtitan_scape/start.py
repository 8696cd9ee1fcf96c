"""Start of a training run on this node: recipe, number of processes and threads, then the launcher.

    torchtitan-scape train --sync.scape.density=0.01
    CONFIG_FILE=a.toml,b.toml NGPU=4 torchtitan-scape train

`run_train.sh` is the same in a clone, and describes the environment variables.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

from torchtitan_scape.config.recipes import split_names
from torchtitan_scape.core.files import packaged
from torchtitan_scape.runtime import launch

EMBEDDED = "train_configs/embedded.toml"


def recipe_files(given: str) -> str:
    """Return the recipes with the paths of existing files, or raise ValueError.

    A relative path is looked up in the folder of the call, then in the working directory, then in this package.
    """
    paths, folder = [], os.environ.get("SCAPE_CALLED_FROM", "")
    for name in split_names(given):
        called = os.path.join(folder, name)
        path = called if folder != os.getcwd() and os.path.isfile(called) else packaged(name)
        if not os.path.isfile(path):
            wrong = "is a folder" if os.path.isdir(path) else "does not exist"
            raise ValueError(f"CONFIG_FILE: {name} {wrong}; recipes are in {os.path.dirname(packaged(EMBEDDED))}/")
        paths.append(path)
    return ",".join(paths)


def number_of(name: str) -> int:
    """Return the number from 1 in an environment variable, 0 if it is not set, or raise ValueError."""
    value = os.environ.get(name, "")
    if value and not re.fullmatch("[1-9][0-9]*", value):
        raise ValueError(f"{name}={value}; it must be a number, 1 or more")
    return int(value or 0)


def node_range() -> tuple[int, int]:
    """Return the smallest and the largest number of nodes in NNODES, such as 2 or 2:4, or raise ValueError."""
    value = os.environ.get("NNODES") or "1"
    match = re.fullmatch("([1-9][0-9]*)(?::([1-9][0-9]*))?", value)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise ValueError(f"NNODES={value}; it must be a number, 1 or more, or a range such as 2:4")
    return least, most


def count_devices() -> int:
    """Return the number of GPUs. In a process of its own, because torch reads variables when it is imported.

    Raises ImportError if torch cannot be imported, ValueError if the process failed otherwise.
    """
    counting = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    counted = subprocess.run(counting, capture_output=True, text=True, check=False)
    *_, last = ["", *counted.stdout.split()]
    if counted.returncode or not last.isdigit():
        import_module("torch")  # raises the error of that process
        *_, reason = ["no output", *counted.stderr.strip().splitlines()]
        raise ValueError(f"the GPUs cannot be counted: {reason}; set NGPU to the number of processes")
    return int(last)


def prepare() -> tuple[list[str], str]:
    """Set the variables of the ranks, and return the options of the launcher and the recipe, or raise ValueError."""
    ranks, (least, nodes), endpoint = number_of("NGPU"), node_range(), os.environ.get("RDZV_ENDPOINT")
    shown = os.environ.get("LOG_RANK") or "0"
    if not re.fullmatch("[0-9]+(,[0-9]+)*", shown):
        raise ValueError(f"LOG_RANK={shown}; it must be numbers of ranks, such as 0,1")
    recipe = recipe_files(os.environ.get("CONFIG_FILE") or EMBEDDED)
    ranks = ranks or count_devices() or 2
    if min(map(int, shown.split(","))) >= ranks:
        raise ValueError(f"LOG_RANK={shown}: a node has {ranks} ranks here, from 0 on; no output would be shown")
    # Log only errors of C++: the warnings about a lost store have 30 lines each and hide the name of the lost rank.
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "NGPU": str(ranks)}
    os.environ |= {name: value for name, value in defaults.items() if not os.environ.get(name)}
    if nodes > 1 and not endpoint:
        raise ValueError(f"NNODES={os.environ['NNODES']} needs RDZV_ENDPOINT=host:port, the same on every node")
    if least < nodes and not os.environ.get("MAX_RESTARTS"):
        os.environ["MAX_RESTARTS"] = "3"
    launcher = [f"--nnodes={least}:{nodes}", f"--nproc_per_node={ranks}", "--rdzv_backend=launchers"]
    launcher += [f"--rdzv_endpoint={endpoint or 'localhost:0'}", f"--local-ranks-filter={shown}"]
    return [*launcher, "--role=rank", "--tee=3"], recipe


def elastic_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments of the trainer for NNODES=MIN:MAX, and set SCAPE_NODE_COUNTS for the launcher.

    A process of its own reads the recipe, because it imports torch and may use a device. Restarts use its result.
    Raises SystemExit if the recipe cannot be used with several numbers of nodes; the process has printed the reason.
    """
    least, most = node_range()
    if least == most:
        return arguments
    if "SCAPE_NODE_COUNTS" not in os.environ:
        counting = ["-m", "torchtitan_scape.trainer.layout", str(least), str(most), os.environ["NGPU"]]
        counted = subprocess.run(
            [sys.executable, *counting, *arguments], stdout=subprocess.PIPE, text=True, check=False
        )
        if counted.returncode:
            raise SystemExit(counted.returncode)
        counts, batch = counted.stdout.splitlines()[-1].rsplit(" ", 1)
        os.environ |= {"SCAPE_NODE_COUNTS": counts, "SCAPE_GLOBAL_BATCH": batch}
    # Before the user's own arguments, which take precedence.
    return [*arguments[:2], f"--training.global_batch_size={os.environ['SCAPE_GLOBAL_BATCH']}", *arguments[2:]]


def main() -> None:
    """Start the launcher, or in this process a dry run or the help."""
    given, mode = sys.argv[1:], os.environ.get("COMM_MODE")
    if {"--help", "-h"} & set(given):
        train(given)
        return
    try:
        launcher, recipe = prepare()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    arguments = ["--job.config_file", recipe]
    if mode:
        # One process acts as rank 0 of NGPU. --training.steps=N runs N steps; by default the run is only built.
        os.environ["LOCAL_RANK"] = "0"
        train([*arguments, f"--comm.mode={mode}", "--training.steps=0", *given])
        return
    if find_spec("torchtitan") is None:  # every rank would report it
        raise ModuleNotFoundError("No module named 'torchtitan'", name="torchtitan")
    arguments = elastic_arguments([*arguments, *given])
    program = os.environ.get("TRAIN_PROGRAM") or "torchtitan_scape.train"
    sys.argv[1:] = [*launcher, "-m", program, *arguments]
    launch.main()


def train(arguments: list[str]) -> None:
    """Run the trainer in this process."""
    from torchtitan_scape import train

    sys.argv[1:] = arguments
    train.main()


if __name__ == "__main__":
    main()
