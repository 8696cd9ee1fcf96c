"""A rank that says that it lives, and nothing else; tests/runtime/test_faults.py starts it as srun would.

python tests/runtime/peer.py WHAT: "fail" ends in an error of the user, "wait" waits for ever, "work" for 6 s.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path

# Without the package, which takes seconds to import.
file = Path(__file__).resolve().parents[2] / "torchtitan_scape" / "runtime" / "liveness.py"
spec = importlib.util.spec_from_file_location("liveness", file)
assert spec is not None and spec.loader is not None
module = sys.modules["liveness"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
Liveness, Failure, WRONG_INPUT = module.Liveness, module.Failure, module.WRONG_INPUT

liveness = Liveness.join(os.environ)
assert liveness is not None
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
