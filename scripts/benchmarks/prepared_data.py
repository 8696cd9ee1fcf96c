"""Speed of prepared data and of `prepare`, and `prepare` under kills.

    python -m scripts.benchmarks.prepared_data rates    # tokens per CPU second
    python -m scripts.benchmarks.prepared_data wait     # share of a step that waits for data
    python -m scripts.benchmarks.prepared_data kills    # output after kills at random moments

rates: Reading prepared data and text in one process, and encoding, by the tokenizer alone and by a worker of `prepare`.
wait: Steps of the embedded recipe on prepared data and on text.
kills: The bytes must equal those of an undisturbed run.
"""

import argparse
import hashlib
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.harness import QUIET, Benchmark, in_new_process, main, train
from scripts.common import ALONE, EMBEDDED
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.data import EMBEDDED_TOKENIZER, prepare
from torchtitan_scape.data.datasets import build_dataloader
from torchtitan_scape.data.prepare import PrepareWork
from torchtitan_scape.titan.tokenizer import build_tokenizer

DATASET = "standard_library"
SEQUENCES, READ_SECONDS = (256, 2048, 4096), 2.0
PREPARE = ["--dataset", DATASET, "--tokenizer", str(EMBEDDED_TOKENIZER), "--output"]


def prepared(folder: Path) -> Path:
    if prepare.main([*PREPARE, str(folder)]):
        raise ValueError("prepare failed")
    return folder


def tokens_per_second(dataset: str, path: Path | None, sequence: int) -> float:
    """Return the tokens that a loader reads per CPU second, over READ_SECONDS or to its end."""
    config = JobConfig()
    config.model.hf_assets_path = str(EMBEDDED_TOKENIZER)
    config.training.dataset, config.training.dataset_path = dataset, None if path is None else str(path)
    config.training.local_batch_size, config.training.seq_len = 8, sequence
    iterator = iter(build_dataloader(1, 0, build_tokenizer(config), config))
    next(iterator)
    tokens, begin = 0, time.process_time()
    for batch in iterator:
        tokens += batch[1].numel()
        if time.process_time() - begin > READ_SECONDS:
            break
    return tokens / (time.process_time() - begin)


def encoding(folder: Path) -> dict[str, float]:
    """Return tokens per CPU second of the tokenizer and of a worker of `prepare`; alternating, the fastest of three."""
    plan, parts, sources, encoder = prepare.plan_of(prepare._parser().parse_args([*PREPARE, str(folder)]))
    texts = [text for _, text in sources[0].read(parts[0])]
    borders = len(encoder.encode(""))  # tokens around a document

    def tokenizer(_: int) -> int:
        batches = (texts[i : i + 512] for i in range(0, len(texts), 512))
        encode = partial(encoder.tokenizer.encode_batch_fast, add_special_tokens=False)
        return sum(len(one.ids) for batch in batches for one in encode(batch))

    def worker(number: int) -> int:
        unfinished = folder / str(number) / "unfinished"
        unfinished.mkdir(parents=True)
        task = PrepareWork(unfinished.parent, unfinished, plan, parts[:1], sources[:1], encoder)
        task(0, lambda *_: None)
        return sum(shard.tokens - borders * shard.documents for shard in task.shards(0) or ())

    def rate(work: Callable[[int], int], number: int) -> float:
        begin = time.process_time()
        return work(number) / (time.process_time() - begin)

    bare, whole = (max(found) for found in zip(*((rate(tokenizer, i), rate(worker, i)) for i in range(3)), strict=True))
    return {"bare_tokenizer": bare, "prepare_worker": whole, "worker_of_bare": whole / bare}


def rates(work: Path) -> dict[str, Any]:
    data = {"prepared": prepared(work / "prepared"), DATASET: None}
    read = {f"sequence {n}": {name: tokens_per_second(name, data[name], n) for name in data} for n in SEQUENCES}
    speeds = encoding(work / "encoding")
    return {"tokens per CPU second of one process": read, "encoding, tokens per CPU second": speeds}


class _Uncleared(list[float]):
    def clear(self) -> None:
        """Keep all values: the metrics processor clears its list after each log line."""


def waited(arguments: list[str]) -> dict[str, float]:
    """Train, and return the time that the steps waited for batches."""
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    os.environ |= ALONE
    trainer = ScapeTrainer(parse(arguments))
    times = trainer.metrics_processor.data_loading_times = _Uncleared()
    train(trainer)
    seconds, steps = sum(times), trainer.steps_taken
    return {"share of a step": seconds / trainer.train_seconds, "ms a step": 1e3 * seconds / steps, "steps": steps}


def wait(work: Path) -> dict[str, Any]:
    data = {
        "prepared": ["--training.dataset=prepared", f"--training.dataset_path={prepared(work / 'prepared')}"],
        "text": [f"--training.dataset={DATASET}"],
    }
    common = [f"--job.config_file={EMBEDDED}", "--training.steps=20", *QUIET]
    return {
        name: in_new_process(waited, [*common, f"--job.dump_folder={work / name}", *options])
        for name, options in data.items()
    }


def kills(work: Path, least: int) -> dict[str, Any]:
    """Kill `prepare` at random moments until `least` kills; compare the output of each run that ended."""
    command = [sys.executable, "-m", "torchtitan_scape.data.prepare", "--shard-tokens", "100000"]
    command += ["--validation", "0.01", "--workers", "2", *PREPARE]
    begin = time.monotonic()
    subprocess.run([*command, str(work / "whole")], stdout=subprocess.DEVNULL, check=True)
    seconds, expected = time.monotonic() - begin, digest(work / "whole")
    dice, killed, finished = random.Random(0), 0, 0
    while killed < least:
        folder, code = work / f"killed-{finished}", None
        while code is None:
            timeout = seconds * dice.uniform(0.2, 1.0) if killed < least else None
            try:
                code = subprocess.run([*command, str(folder)], stdout=subprocess.DEVNULL, timeout=timeout).returncode
            except subprocess.TimeoutExpired:  # `run` has sent SIGKILL
                killed += 1
        if code or digest(folder) != expected:
            raise ValueError(f"{folder} differs after {killed} kills")
        finished += 1
    return {"kills": killed, "runs that ended": finished, "equal bytes": True}


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def measurement(work: Callable[..., dict[str, Any]], **arguments: dict[str, Any]) -> Benchmark:
    def measure(args: argparse.Namespace, _: list[str]) -> dict[str, Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with tempfile.TemporaryDirectory(prefix="prepared-data-") as folder:
            found = work(Path(folder), **{key: getattr(args, key) for key in arguments})
        return {"machine": f"{platform.machine()}, {os.cpu_count()} cores"} | found

    flags = {f"--{key}": options for key, options in arguments.items()}
    return Benchmark(measure, None, arguments=flags)


BENCHMARKS = {
    "rates": measurement(rates),
    "wait": measurement(wait),
    "kills": measurement(kills, least=dict(type=int, default=20, help="kills")),
}

if __name__ == "__main__":
    sys.exit(main("scripts.benchmarks.prepared_data", __doc__, BENCHMARKS))
