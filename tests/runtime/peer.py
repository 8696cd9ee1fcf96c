"""A rank that says that it lives, and nothing else; tests/runtime/test_faults.py starts it as srun would.

python -m tests.runtime.peer WHAT: "fail" ends in an error of the user, "wait" waits for ever, "work" for 6 s.
"""

import os
import sys
import time

from torchtitan_scape.runtime.liveness import WRONG_INPUT, Failure, Liveness

liveness = Liveness.join(os.environ)
liveness.expect(4.0)  # so who is silent for 3.2 s is lost
print("ready", flush=True)
match sys.argv[1]:
    case "fail":
        liveness.tell(Failure(liveness.rank, WRONG_INPUT, f"rank {liveness.rank} stopped: no such file"))
        os._exit(WRONG_INPUT)
    case "wait":
        time.sleep(60)
    case "work":
        for _ in range(12):
            time.sleep(0.5)
            liveness.progressed()
liveness.leave()
os._exit(0)
