"""Strong scaling: step times by number of ranks and method, the global batch fixed; a report with the paper's figures.

    python -m scripts.studies.strong_scaling emulated --sizes 2,4,8 --methods adams,scape-0.1 --compute 2 --rate 80
    python -m scripts.studies.strong_scaling emulated --sizes 4 --methods adams,scape-0.01 --compute real --slowdown 7.4
    python -m scripts.studies.strong_scaling slurm --machine vista --sizes 4,8,16,32,64 --recipes RECIPE.toml
    python -m scripts.studies.strong_scaling predicted --machine vista --network 3.5 --recipes RECIPE.toml
    python -m scripts.studies.strong_scaling report --output results/network_bound

emulated    network namespaces on this host (scripts/emulated_cluster.py). Its cores do not multiply with the nodes, so
            forward and backward are a wait: --compute SECONDS at the smallest size, in proportion less at larger ones.
            Exchange and optimizer are real; they share the host's cores. --compute real computes instead.
            --slowdown X chooses the links' rate so that a dense AdamS step takes X times its compute-only step.
slurm       writes one job a size into OUTPUT/jobs, submits it, waits, and collects. Jobs run all methods. Who does not
            want to wait stops it: the same command collects later.
predicted   the cost model alone.
report      the report anew, from what a sweep has stored.

Methods: those of scripts/methods.py, such as adamw, adams, scape-DENSITY, scape-DENSITY-CODE (bf16, int8, int4). For
comparison what a user would pick instead, overlapped with the backward pass: ddp, ddp-bf16, ddp-powersgd-RANK and
ddp-powersgd (of the rank with as many bytes as SCAPE 0.01), PyTorch's DistributedDataParallel with its hooks; hsdp,
TorchTitan's own (hsdp-waits: as gloo does it, which has no streams). What stands after -- goes to the trainer of every
run. A sweep that was stopped goes on where it was: what is in OUTPUT/cells is kept. Failed runs are reported, do not
stop the others, and are tried again next time.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from scripts.common import EMBEDDED, RESULTS, guarded, names, numbers, parser
from scripts.studies import scaling_emulated, scaling_predicted, scaling_slurm
from scripts.studies.scaling_report import write_report
from scripts.studies.scaling_sweep import Sweep

LAUNCHERS = {"emulated": scaling_emulated.run, "slurm": scaling_slurm.run, "predicted": scaling_predicted.run}
PAPER = "train_configs/llama_500m.toml,train_configs/llama_1_8b.toml"
METHODS = "adamw,adams,scape-0.1,scape-0.047-int4,scape-0.01"


def parse(arguments: list[str]) -> argparse.Namespace:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = parser(__doc__)
    commands = own.add_subparsers(dest="launcher", required=True)

    def launcher(name: str, sizes: str, recipes: str) -> Any:
        one = commands.add_parser(name)
        one.add_argument("--sizes", type=numbers, default=numbers(sizes), help=f"numbers of ranks; {sizes}")
        one.add_argument("--methods", type=names, default=names(METHODS), help=METHODS)
        one.add_argument("--recipes", type=names, default=names(recipes), help=recipes)
        one.add_argument("--output", type=Path, default=RESULTS / f"strong_scaling_{name}")
        if name != "predicted":
            one.add_argument("--steps", type=int, default=12, help="measured steps of a run")
            one.add_argument("--warm-up", type=int, default=4, help="steps before them, the first, dense one included")
            one.add_argument("--timeout", type=float, default=1200, help="seconds that a run may take")
        one.add_argument("--batch", type=int, default=0, help="sequences a step over all ranks; 0: the recipe's")
        return one.add_argument

    add = launcher("emulated", "2,4,8", EMBEDDED)
    add("--compute", default="2", help="seconds at the smallest size, or real")
    add("--rate", type=float, default=80.0, help="of a NIC, each way, Mbit/s; 0: not limited")
    add("--slowdown", type=float, default=0.0, help="chooses the rate: dense AdamS step over its compute-only step")
    add("--ranks-per-node", type=int, default=1)
    add("--plain", action="store_true", help="no FSDP around any model but HSDP's")
    add("--loss-steps", type=int, default=0, help="also trains so long, links not limited, for the validation loss")
    add = launcher("slurm", "4,8,16,32,64", PAPER)
    add("--machine", choices=("vista", "frontier"), required=True)
    add("--sbatch", default="", help='options of sbatch, such as "-A ACCOUNT --time=01:00:00"')
    add("--poll", type=float, default=30.0, help="seconds between looks at the jobs")
    add = launcher("predicted", "4,8,16,32,64", PAPER)
    add("--machine", default="vista", help="preset of topology/machines.py")
    add("--network", type=float, default=0.0, help="GB/s that a rank sends over the network; 0: the preset's")
    add("--links", default="", help="JSON of torchtitan_scape.planner.preflight instead of the preset's links")
    add("--shard", type=int, default=1, help="shard degree")
    add("--mfu", type=float, default=0.4, help="share of the peak that forward and backward reach")
    commands.add_parser("report").add_argument("--output", type=Path, required=True, help="with sweep.json and cells/")
    args = own.parse_args(arguments[:end])
    args.rest = arguments[end + 1 :]
    return args


def run(args: argparse.Namespace) -> int:
    if args.launcher == "report":
        print(f"wrote {write_report(args.output)}")
        return 0
    return 1 if LAUNCHERS[args.launcher](Sweep(args)) else 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(parse(sys.argv[1:]))))
