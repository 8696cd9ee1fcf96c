"""Comparison of configuration, code and data over all ranks, once, before anything is built.

A rank with another configuration, another version of the code or other files trains something else than the others, or
leaves them waiting in a collective, without an explanation. One all-gather of 16 bytes per rank detects this. Only if
ranks differ do they exchange the values.
"""

import functools
import hashlib
import json
import os
import platform
import socket
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_scape
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.resolved import values_of
from torchtitan_scape.core.files import may_pass
from torchtitan_scape.core.text import first_text
from torchtitan_scape.data.corpora import CORPORA
from torchtitan_scape.data.manifest import paths_of
from torchtitan_scape.data.prepared import NAME, blend_of
from torchtitan_scape.topology.torch_version import all_gather_into

DISTRIBUTIONS = ("torchtitan", "triton", "datasets", "tokenizers")
# All values of the recipe are compared; its path may differ between nodes.
MAY_DIFFER = ("job.config_file",)
# A fingerprint covers this many bytes at the beginning, middle and end of at most this many files.
SAMPLE_BYTES, MAX_FILES = 1 << 16, 32
MAX_NAMED = 5  # Differing ranks listed in the error.


@functools.cache
def code_versions() -> dict[str, str]:
    """Return a hash of this package, and the versions of its dependencies."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    root, digest = Path(torchtitan_scape.__file__).parent, hashlib.sha256()
    folders = (Path(folder) for folder, _, _ in os.walk(root, followlinks=True))
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    versions["the sources of torchtitan_scape"] = digest.hexdigest()[:16]
    return {f"code: {key}": value for key, value in versions.items()}


def file_facts(name: str, path: str | None, endings: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Return names, sizes and a fingerprint of the files of a local path, or its error if it does not exist.

    The path is a file, a Megatron pair without extension, or a folder, whose files with these endings are included.
    """
    if not path:
        return {}
    root = Path(path)
    try:
        if root.is_dir():
            candidates = sorted(root.rglob("*"))
        else:
            candidates = [file for file in paths_of(root) if file.exists()] or [root]
        files = [file for file in candidates if file.name.endswith(endings) and not file.is_dir()]
        sizes = {os.path.relpath(file, root): file.stat().st_size for file in files}
        content = hashlib.sha256()
        for file in files[:: -(-len(files) // MAX_FILES) or 1]:
            with open(file, "rb") as data:
                size = file.stat().st_size
                for begin in (0, max(0, size // 2), max(0, size - SAMPLE_BYTES)):
                    data.seek(begin)
                    content.update(data.read(SAMPLE_BYTES))
    except OSError as error:
        if may_pass(error):
            raise
        return {f"{name}: files of {path}": f"not readable ({error.strerror})"}
    listed = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]
    return {
        f"{name}: files of {path}": f"{len(sizes)} of {sum(sizes.values())} bytes (names and sizes {listed})",
        f"{name}: content of {path}": f"fingerprint {content.hexdigest()[:16]}",
    }


def facts(config: JobConfig) -> dict[str, str]:
    """Return all properties that ranks must have in common, as text, by name."""
    collected = {key: repr(value) for key, value in values_of(config) if key not in MAY_DIFFER} | code_versions()
    # Only tokenizer files, because the folder may also contain weights.
    collected |= file_facts("tokenizer", config.model.hf_assets_path, (".json", ".txt", ".model"))
    training = config.training
    paths = [training.dataset_path or ""]
    if training.dataset.lower() == NAME:
        paths = [path for _, path in blend_of(paths[0])]
    for path in paths:
        collected |= file_facts("training data", path)
    if config.validation.enable:
        collected |= file_facts("validation data", config.validation.dataset_path)
    for name, corpus in CORPORA.items():
        if config.training.dataset.lower().startswith(name):
            try:
                collected[f"training data: {corpus.source}"] = corpus.read().digest
            except ValueError as error:  # Raised again when this rank reads the data.
                collected[f"training data: {corpus.source}"] = str(error)
    return collected


def check_ranks_agree(own: dict[str, str], device: torch.device) -> None:
    """Compare the facts of all ranks. Collective over all ranks: 16 bytes per rank if they agree.

    Raises ValueError on every rank, with a rank that differs, the property and both values.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()[:16]
    sent = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    gathered = torch.empty(world * 2, dtype=torch.int64, device=device)
    all_gather_into(gathered, sent)
    pairs = [tuple(pair) for pair in gathered.view(world, 2).tolist()]
    counts = Counter(pairs)
    if len(counts) == 1:
        return
    # The most frequent facts count as correct; ties are resolved by the lowest rank.
    common = max(counts, key=lambda pair: (counts[pair], -pairs.index(pair)))
    reference = pairs.index(common)
    other = next(i for i in range(world) if pairs[i] != common)
    reference_facts: list[Any] = [own] if rank == reference else [None]
    dist.broadcast_object_list(reference_facts, src=reference, device=device)
    other_facts: list[Any] = [own, socket.gethostname()] if rank == other else [None, None]
    dist.broadcast_object_list(other_facts, src=other, device=device)
    differing = [i for i in range(world) if pairs[i] != common]
    text = describe_difference(reference_facts[0], reference, other_facts[0], other, differing)
    raise ValueError(f"{text}; rank {other} is on {other_facts[1]}")


def describe_difference(
    expected: dict[str, str], rank: int, actual: dict[str, str], other: int, differing: list[int]
) -> str:
    """Return one line about the differences of rank `other`, the first of those `differing`, from rank `rank`."""
    keys = [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)]
    # If a path differs, so do its files. The path is the first key.
    key = keys[0]
    more = f" ({len(keys) - 1} more differ, {', '.join(keys[1:3])})" if len(keys) > 1 else ""
    named = first_text(differing, MAX_NAMED)
    noun = "rank" if len(differing) == 1 else "ranks"
    return (
        f"rank {other} has {key} = {actual.get(key, 'none')}, rank {rank} has {expected.get(key, 'none')}{more}; "
        f"every rank needs the same config, code, data and tokenizer (different: {noun} {named})"
    )
