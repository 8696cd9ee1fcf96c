"""A rank with heartbeats and no work; tests/runtime/test_faults.py starts it as srun would.

python -m tests.runtime.peer WHAT: "fail" ends with a user error, "wait" waits forever, "work" works for 6 s. "reduce"
waits in a collective for a rank that is in "hang".
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_scape.runtime.liveness import LOST, WRONG_INPUT, Failure, Liveness

liveness = Liveness.join(os.environ)
liveness.set_timeout(4.0)  # A rank without heartbeats for 3.2 s is then considered lost.
print("ready", flush=True)
match sys.argv[1]:
    case "fail":
        liveness.report(Failure(liveness.rank, WRONG_INPUT, f"rank {liveness.rank} stopped: no such file"))
        os._exit(WRONG_INPUT)
    case "wait":
        time.sleep(60)
    case "work":
        for _ in range(12):
            time.sleep(0.5)
            liveness.report_progress()
    case "reduce" | "hang":
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        if sys.argv[1] == "hang":
            time.sleep(60)
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            liveness.end(liveness.find_failure() or Failure(liveness.rank, LOST, "unknown"))
liveness.leave()
os._exit(0)
