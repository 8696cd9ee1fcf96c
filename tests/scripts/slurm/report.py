"""Replaces the trainer: writes a rank's arguments and environment.

With FAIL=R rank R fails, and the others wait; with INVALID=R it finds its input invalid, or ends with the exit code
CODE. With STOP="STEP SIGNAL" the ranks end as after a signal at that step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan_scape.runtime.liveness import WRONG_INPUT, Failure, record_failure
from torchtitan_scape.topology.layout import ranks_per_node_from_environment

rank = os.environ["RANK"]
if failing := os.environ.get("FAIL"):
    if rank == failing:
        sys.exit(f"[rank {rank}] error: as asked for")
    time.sleep(120)
if invalid := os.environ.get("INVALID"):
    if rank == invalid:
        code = int(os.environ.get("CODE", WRONG_INPUT))
        record_failure(Failure(int(rank), code, "as asked for"))
        sys.exit(code)
    time.sleep(120)
if stop := os.environ.get("STOP"):
    if progress := os.environ.get("SCAPE_PROGRESS_FILE"):
        Path(progress).write_text(f"resumed 0\nstopped {stop}\n")
    while not Path(os.environ["LOG_DIR"], "progress").read_text():  # srun ends the others with the first rank
        time.sleep(0.05)
    sys.exit(75)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SLURM_NODEID")
facts: dict[str, Any] = {name: os.environ[name] for name in names}
facts["ranks_per_node"] = ranks_per_node_from_environment(os.environ, int(facts["WORLD_SIZE"]))
facts["arguments"], facts["srun"] = sys.argv[1:], os.environ.get("STANDIN_OPTIONS", "")
for name in ("NCCL_NET", "PYTHONPATH", *(n for n in os.environ if n.startswith(("HF_", "TRITON_", "TORCHINDUCTOR_")))):
    facts[name] = os.environ.get(name)
Path(os.environ["LOG_DIR"], f"facts-{rank}.json").write_text(json.dumps(facts))
