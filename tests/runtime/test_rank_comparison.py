"""Ranks with different configuration, code or data are named on all ranks before anything is built."""

import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.training import RECIPE, train
from torchtitan_scape.runtime.rank_comparison import describe_difference, file_facts


def compare(arguments: list[list[str]], code: str | None = None) -> None:
    """Run the comparison, with different arguments per rank (the last ones for the remaining ranks)."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.runtime import rank_comparison

    rank = dist.get_rank()
    facts = rank_comparison.facts(parse([*RECIPE, *arguments[min(rank, len(arguments) - 1)]]))
    if code and rank == 1:
        facts[code] = "patched"
    with patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as details:
        try:
            rank_comparison.check_ranks_agree(facts, torch.device("cpu"))
        finally:
            assert details.called == (len({tuple(a) for a in arguments}) > 1 or code is not None)


def refused(pool: Pool, *args: Any) -> str:
    texts = []
    for good, text in pool.outcomes(compare, *args):
        assert not good
        texts.append(text.splitlines()[-1])
    assert len(set(texts)) == 1 and texts[0].startswith("ValueError: rank ")
    return texts[0]


def test_equal_ranks_exchange_only_hashes(pool2: Pool) -> None:
    pool2(compare, [["--training.steps=3"]])


@pytest.mark.parametrize(
    "one, other, message",
    [
        ("--training.steps=3", "--training.steps=4", "rank 1 has training.steps = 4, rank 0 has 3;"),
        ("--sync.scape.density=0.1", "--sync.scape.density=0.2", "sync.scape.density = 0.2, rank 0 has 0.1;"),
        ("--training.dataset_path=/a", "--training.dataset_path=/b", "training.dataset_path = '/b', rank 0 has '/a'"),
    ],
)
def test_another_config_value_is_named(one: str, other: str, message: str, pool2: Pool) -> None:
    text = refused(pool2, [[one], [other]])
    assert message in text and "every rank needs the same" in text


@pytest.mark.parametrize("key", ["code: the sources of torchtitan_scape", "code: torch"])
def test_another_version_is_named(key: str, pool2: Pool) -> None:
    assert f"rank 1 has {key} = patched, rank 0 has" in refused(pool2, [[]], key)


def test_a_rank_that_differs_from_the_majority_is_named(pool4: Pool) -> None:
    text = refused(pool4, [["--training.steps=3"], ["--training.steps=4"]])
    assert "rank 0 has training.steps = 3, rank 1 has 4; " in text
    assert text.endswith(f"(different: rank 0); rank 0 is on {socket.gethostname()}")


def trained(folder: str, view: list[str]) -> None:
    """Run the trainer with a path that is a different folder on every rank, like node-local copies."""
    from torchtitan_scape.runtime import rank_comparison

    def local(name: str, path: str | None, *args: Any) -> dict[str, str]:
        found = file_facts(name, path and path.replace("NODE", str(dist.get_rank())), *args)
        return {key.replace(f"node{dist.get_rank()}", "node"): value for key, value in found.items()}

    with patch.object(rank_comparison, "file_facts", local):
        train(folder, ["--training.steps=1", *view])


@pytest.mark.parametrize("kind", ["data", "tokenizer"])
def test_different_content_of_one_path_is_named(kind: str, pool2: Pool, tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(f'{{"version": "{rank}"}}')
        (folder / "a.jsonl").write_text(f'{{"text": "{rank if kind == "data" else 0} spam and eggs"}}\n')
        (folder / "readme").write_text("")
    key = "training.dataset_path" if kind == "data" else "model.hf_assets_path"
    outcomes = pool2.outcomes(trained, str(tmp_path), [f"--{key}={tmp_path}/nodeNODE"])
    for good, text in outcomes:
        assert not good
        name = "training data" if kind == "data" else "tokenizer"
        assert f"ValueError: rank 1 has {name}: content of {tmp_path}/node = fingerprint" in text.splitlines()[-1]


def test_files_differ_by_name_size_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(content: dict[str, bytes]) -> dict[str, str]:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for name, text in content.items():
            (folder / name).write_bytes(text)
        return file_facts("data", str(folder))

    large = bytes(1 << 20)
    contents = [
        {"a": b"1", "b": large},
        {"a": b"1", "c": large},
        {"a": b"1", "b": large + b"x"},
        {"a": b"2", "b": large},
        {"a": b"1", "b": large[:-1] + b"x"},
        {"a": b"1"},
    ]
    assert len({str(facts(content)) for content in contents}) == len(contents)
    assert facts(contents[0]) == facts(contents[0])
    assert list(file_facts("data", str(tmp_path / "none")).values()) == ["not readable (No such file or directory)"]
    facts({"pair.bin": b"1", "pair.idx": b"2", "other": b"3"})
    assert "2 of 2 bytes" in next(iter(file_facts("data", str(tmp_path / "data" / "pair")).values()))
    monkeypatch.chdir(tmp_path / "data")
    assert "3 of 3 bytes" in next(iter(file_facts("data", ".").values()))


def test_many_differences_are_one_line() -> None:
    meant = {f"key {i}": "1" for i in range(100)}
    odd = {f"key {i}": "2" for i in range(100)} | {"new": "3"}
    text = describe_difference(meant, 0, odd, 7, list(range(1, 1000)))
    assert text.startswith("rank 7 has key 0 = 2, rank 0 has 1 (100 more differ, key 1, key 2);")
    assert len(text) < 300 and text.endswith("ranks 1, 2, 3, 4, 5 and 994 more)")
