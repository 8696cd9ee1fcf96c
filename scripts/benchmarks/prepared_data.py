"""Measures prepared data: tokens read per CPU second, the bare tokenizer against `prepare`, and the wait of a step.

    python -m scripts.benchmarks.prepared_data [rates|wait|kills] [--output FOLDER]

rates: tokens per CPU second of one process, at several sequence lengths, of prepared data and of the text loader; and
of encoding, by the tokenizer alone and by a worker of `prepare`. CPU seconds are robust where others use the machine.
wait: share of a step of the embedded recipe that is spent on its data, prepared and as text.
kills: `prepare`, killed at random moments until it ends, against an undisturbed run, byte for byte.

Writes results/prepared_data/NAME.json.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scripts.common import ALONE, EMBEDDED, RESULTS, command_of, guarded, parser
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import EMBEDDED_TOKENIZER, prepare
from torchtitan_scape.data.datasets import build_dataloader
from torchtitan_scape.data.manifest import Manifest
from torchtitan_scape.data.prepare_parts import Encoder, PrepareWork, TextSource
from torchtitan_scape.titan.tokenizer import build_tokenizer

DATASET = "standard_library"
SEQUENCES = (256, 2048, 4096)
KILLS = 20


def prepared(folder: Path, *options: str) -> Path:
    arguments = ["--dataset", DATASET, "--tokenizer", str(EMBEDDED_TOKENIZER), "--output", str(folder), *options]
    if prepare.main(arguments):
        raise ValueError("prepare failed")
    return folder


def _loader(dataset: str, path: Path | None, sequence: int, batch: int) -> Any:
    config = JobConfig()
    config.model.hf_assets_path = str(EMBEDDED_TOKENIZER)
    config.training.dataset, config.training.dataset_path = dataset, None if path is None else str(path)
    config.training.local_batch_size, config.training.seq_len = batch, sequence
    return build_dataloader(1, 0, build_tokenizer(config), config)


def per_cpu_second(batches: Iterable[Any], tokens_of: Callable[[Any], int], least: float = 2.0) -> float:
    """Tokens per CPU second, over `least` seconds or until there is no more."""
    iterator = iter(batches)
    next(iterator)
    tokens, begin = 0, time.process_time()
    for batch in iterator:
        tokens += tokens_of(batch)
        if time.process_time() - begin > least:
            break
    return tokens / (time.process_time() - begin)


def _encoding(folder: Path) -> dict[str, float]:
    """Encoding by the tokenizer alone, and all that a worker of `prepare` does, in turn, the faster of three each."""
    options = prepare._parser().parse_args(
        ["--dataset", DATASET, "--tokenizer", str(EMBEDDED_TOKENIZER), "--output", str(folder)]
    )
    plan, parts, sources, encoder = prepare.plan_of(options)
    bare_rates, worker_rates = [], []
    texts = [text for _, text in sources[0].read(parts[0])]
    hf = encoder._encode
    for number in range(3):
        begin = time.process_time()
        tokens = sum(
            len(found.ids)
            for i in range(0, len(texts), 512)
            for found in hf(texts[i : i + 512], add_special_tokens=False)
        )
        bare_rates.append(tokens / (time.process_time() - begin))
        worker_rates.append(_worker(folder / str(number), plan, parts[0], sources[0], encoder))
    bare, worker = max(bare_rates), max(worker_rates)
    return {"bare_tokenizer": bare, "prepare_worker": worker, "worker_of_bare": worker / bare}


def _worker(folder: Path, plan: Manifest, part: Any, source: TextSource, encoder: Encoder) -> float:
    """Tokens of text (without borders) per CPU second of the work on a part."""
    unfinished = folder / "unfinished"
    unfinished.mkdir(parents=True)
    done = [0, 0, 0]

    def count(*more: int) -> None:
        done[:] = [a + b for a, b in zip(done, more, strict=True)]

    begin = time.process_time()
    PrepareWork(folder, unfinished, plan, [part], [source], encoder)(0, count)
    seconds = time.process_time() - begin
    borders = len(encoder._before) + len(encoder._after)
    return (done[1] - borders * done[0]) / seconds


def rates(work: Path) -> dict[str, Any]:
    folder = prepared(work / "prepared")
    found: dict[str, Any] = {"tokens per CPU second of one process": {}}
    for sequence in SEQUENCES:
        found["tokens per CPU second of one process"][f"sequence {sequence}"] = {
            name: per_cpu_second(_loader(name, path, sequence, 8), lambda batch: batch[1].numel())
            for name, path in (("prepared", folder), (DATASET, None))
        }
    return found | {"encoding, tokens per CPU second": _encoding(work / "encoding")}


def wait(work: Path) -> dict[str, Any]:
    """Seconds in which the trainer waits for a batch, of all seconds of its steps, in a process of its own each."""
    folder = prepared(work / "prepared")
    data = {
        "prepared": ["--training.dataset=prepared", f"--training.dataset_path={folder}"],
        "text": [f"--training.dataset={DATASET}"],
    }
    code = (
        "import json, sys\n"
        "from torchtitan_scape.config.parsing import parse\n"
        "from torchtitan_scape.trainer.trainer import ScapeTrainer\n"
        "trainer = ScapeTrainer(parse(sys.argv[1:]))\n"
        "class Kept(list):\n"
        "    def clear(self): pass\n"
        "times = trainer.metrics_processor.data_loading_times = Kept()\n"
        "trainer.train()\n"
        "print(json.dumps([sum(times), trainer.train_seconds, trainer.steps_taken]))\n"
    )
    found = {}
    for name, arguments in data.items():
        command = [sys.executable, "-c", code, f"--job.config_file={EMBEDDED}", *arguments]
        command += [f"--job.dump_folder={work / name}", "--training.steps=20", "--validation.no-enable"]
        environment = {**os.environ, **ALONE, "OMP_NUM_THREADS": "1", "MASTER_PORT": "29611"}
        output = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if output.returncode:
            raise ValueError(output.stderr[-2000:])
        waited, total, steps = json.loads(output.stdout.splitlines()[-1])
        found[name] = {"share of a step": waited / total, "ms a step": 1e3 * waited / steps, "steps": steps}
    return found


def kills(work: Path) -> dict[str, Any]:
    """Random moments, until KILLS were survived; the output is compared after every finished run."""
    options = ["--shard-tokens", "100000", "--validation", "0.01", "--workers", "2"]
    command = [sys.executable, "-m", "torchtitan_scape.data.prepare", "--dataset", DATASET, "--tokenizer"]
    command += [str(EMBEDDED_TOKENIZER), *options, "--output"]
    begin = time.monotonic()
    subprocess.run([*command, str(work / "whole")], stdout=subprocess.DEVNULL, check=True)
    seconds, expected = time.monotonic() - begin, _digest(work / "whole")
    chance, killed, finished = random.Random(0), 0, 0
    while killed < KILLS:
        folder = work / f"killed-{finished}"
        while True:
            process = subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL)
            try:
                process.wait(timeout=seconds * chance.uniform(0.2, 1.0) if killed < KILLS else None)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
        if process.returncode or _digest(folder) != expected:
            raise ValueError(f"{folder} differs after {killed} kills")
        finished += 1
    return {"kills": killed, "runs that ended": finished, "equal bytes": True}


def _digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def run(names: list[str], output: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in names:
        work = Path(tempfile.mkdtemp(prefix="prepared-data-"))
        try:
            found = {"rates": rates, "wait": wait, "kills": kills}[name](work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        found = {
            "command": command_of("scripts.benchmarks.prepared_data"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        } | found
        text = json.dumps(found, indent=1)
        output.mkdir(parents=True, exist_ok=True)
        (output / f"{name}.json").write_text(text + "\n")
        print(text)


def main() -> int:
    own = parser(__doc__)
    own.add_argument("names", nargs="*", help="rates, wait, kills (default: all)")
    own.add_argument("--output", type=Path, default=RESULTS / "prepared_data")
    arguments: argparse.Namespace = own.parse_args()
    return guarded(lambda: run(arguments.names or ["rates", "wait", "kills"], arguments.output))


if __name__ == "__main__":
    sys.exit(main())
