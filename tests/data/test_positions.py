"""Positions of readers: the same batches after resuming, and every document once with another number of readers."""

import copy
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import datasets as ours
from torchtitan_scape.data import loader as loading
from torchtitan_scape.data.encoding import BoundaryTokenizer
from torchtitan_scape.data.loader import (
    Documents,
    NoTextError,
    TextDataLoader,
    _split_ranges,
    documents,
    text_loader,
)
from torchtitan_scape.data.read_ahead import SimulatedDataLoader

N = 40


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Documents of unequal length in eight files."""
    for file in range(8):
        rows = [{"text": f"<{file * 5 + i}>" + "x" * (37 * (file * 5 + i) % 90)} for i in range(5)]
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture(params=["stored", "streamed"])
def kind(request: pytest.FixtureRequest, texts: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kind of data of `text_files`."""
    if request.param == "streamed":
        stream(texts, monkeypatch)
    return str(request.param)


def stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `text_files` be a stream of the files of a folder."""
    files = sorted(map(str, folder.glob("*.jsonl")))
    config = type(ours.DATASETS["text_files"])(
        "", lambda _: load_dataset("json", data_files=files, split="train", streaming=True), ours._text
    )
    monkeypatch.setitem(ours.DATASETS, "text_files", config)


def loader(path: Path, tokenizer: Any, rank: int, world: int, epochs: int = 0) -> TextDataLoader:
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = "text_files", str(path)
    config.training.local_batch_size, config.training.seq_len = 2, 16
    return text_loader(config.training, "text", tokenizer, "bos_eos", rank, world, epochs)


def take(batches: Any, n: int) -> list[torch.Tensor]:
    return [labels.clone() for _, labels in itertools.islice(batches, n)]


@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_reader_yields_the_same_batches(world: int, kind: str, texts: Path, tokenizer: Any) -> None:
    """Three readers share a stream of eight files document by document, in the second epoch too."""
    for n_read in (7, 60) if kind == "streamed" else (60,):
        first = loader(texts, tokenizer, 1, world)
        batches = iter(first)
        take(batches, n_read)
        state = json.loads(json.dumps(first.state_dict()))  # plain text and numbers
        resumed = loader(texts, tokenizer, 1, world)
        resumed.state_dict()  # A checkpoint reader calls it before loading.
        resumed.load_state_dict(state)
        expected = take(batches, 30)
        assert all(torch.equal(a, b) for a, b in zip(expected, take(iter(resumed), 30), strict=True))
        assert resumed.state_dict() == first.state_dict()


def reader(data: Any, rank: int, world: int) -> Documents:
    return documents("test", data, lambda sample: str(sample["text"]), rank, world)


def read(reader_: Documents, n: int) -> list[tuple[int, int]]:
    """Return (epoch, document) of the next n documents; starts the next epoch as TorchTitan does."""
    found: list[tuple[int, int]] = []
    while True:
        for sample in reader_:
            found.append((reader_.epoch, int(sample["text"].partition(">")[0].strip("<"))))
            if len(found) == n:
                return found
        reader_.set_epoch(reader_.epoch + 1)


def redealt(data: Any, old: list[Documents], world: int) -> list[Documents]:
    states = [json.loads(json.dumps(reader_.state_dict())) for reader_ in old]
    new = [reader(data, rank, world) for rank in range(world)]
    for reader_ in new:
        reader_.load_resharded(states)
    return new


def rest(reader_: Documents, epochs: int) -> list[tuple[int, int]]:
    """Return the documents that a reader yields up to the end of epoch `epochs` - 1."""
    found: list[tuple[int, int]] = []
    while reader_.epoch < epochs:
        found += [(reader_.epoch, int(sample["text"].partition(">")[0].strip("<"))) for sample in reader_]
        reader_.set_epoch(reader_.epoch + 1)
    return found


@pytest.mark.parametrize("worlds", [(4, 2), (2, 4), (4, 3), (1, 4), (4, 2, 3), (8, 1, 5)])
@pytest.mark.parametrize("counts", [(3, 5, 4, 2, 5, 1, 0, 5), (0,) * 8, (21, 7, 14, 3, 12, 9, 11, 6)])
def test_any_number_of_readers_reads_every_document_once_per_epoch(
    worlds: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    """Stored data, including readers in different epochs."""
    data = Dataset.from_dict({"text": [f"<{i}>" for i in range(N)]})
    readers = [reader(data, rank, worlds[0]) for rank in range(worlds[0])]
    seen: list[tuple[int, int]] = []
    for world in worlds[1:]:
        for reader_, n in zip(readers, counts, strict=False):
            seen += read(reader_, n) if n else []
        readers = redealt(data, readers, world)
    epochs = 1 + max(epoch for epoch, _ in [*seen, (0, 0)]) + 1
    for reader_ in readers:
        seen += rest(reader_, epochs)
    assert Counter(seen) == Counter((epoch, i) for epoch in range(epochs) for i in range(N))


@pytest.mark.parametrize("kind", ["streamed"], indirect=True)
@pytest.mark.parametrize(
    "worlds, counts, repeated",
    [
        ((4, 2), (3, 7, 4, 8), 0),  # Each reader has its own files, before and after.
        ((2, 8), (6, 1), 0),
        ((4, 3), (3, 7, 4, 8), 0),
        ((3, 2), (3, 5, 4), 3),  # One document in three per reader: those beyond the slowest reader's next one.
        ((3, 4, 2), (4, 4, 4, 4), 0),
    ],
)
def test_a_stream_is_redistributed_by_its_rule(
    kind: str, worlds: tuple[int, ...], counts: tuple[int, ...], repeated: int, texts: Path
) -> None:
    data = ours.DATASETS["text_files"].loader(str(texts))
    readers = [reader(data, rank, worlds[0]) for rank in range(worlds[0])]
    seen: list[tuple[int, int]] = []
    for world in worlds[1:]:
        for reader_, n in zip(readers, counts, strict=False):
            seen += read(reader_, n)
        readers = redealt(data, readers, world)
    for reader_ in readers:
        seen += rest(reader_, 2)
    found = Counter(seen)
    assert set(found) == {(epoch, i) for epoch in range(2) for i in range(N)}
    assert found.total() - len(found) == repeated


def test_tokens_not_yet_yielded_are_kept(texts: Path, tokenizer: Any) -> None:
    """All tokens of an epoch, read by four ranks, then by three; sequence boundaries differ."""

    old = [loader(texts, tokenizer, rank, 4, epochs=1) for rank in range(4)]
    given = [token for one in old for labels in take(iter(one), 3) for token in labels.flatten().tolist()]
    n_labels = len(given)
    new = [loader(texts, tokenizer, rank, 3, epochs=1) for rank in range(3)]
    states = [one.state_dict() for one in old]
    lines = {one.load_resharded(states) for one in new}
    assert lines == {"data: the checkpoint has 4 data-parallel ranks; the rest of epoch 0 is divided among 3"}
    for one in new:
        n_labels += sum(labels.numel() for labels in take(iter(one), 1000))
    left = sum(len(json.loads(one.state_dict()[f"dp_rank_{i}"])["tokens"]) for i, one in enumerate(new))
    everything = Dataset.from_list(
        [json.loads(line) for f in sorted(texts.glob("*.jsonl")) for line in f.read_text().splitlines()]
    )
    total = sum(len(tokenizer.encode(text, add_bos=True, add_eos=True)) for text in everything["text"])
    # A sequence of 16 labels takes 17 tokens.
    assert n_labels * 17 // 16 + left == total


def test_simulated_replicas_and_real_ranks_have_the_same_state(texts: Path, tokenizer: Any) -> None:
    def play(world: int) -> SimulatedDataLoader:
        return SimulatedDataLoader([loader(texts, tokenizer, rank, world) for rank in range(world)])

    four = play(4)
    batches = iter(four)
    take(batches, 8)
    state = four.state_dict()
    assert set(state) == {"world_size", *(f"dp_rank_{i}" for i in range(4))}
    again, two = play(4), play(2)
    assert "continues at its position" in again.load_resharded([state])
    assert all(torch.equal(a, b) for a, b in zip(take(batches, 8), take(iter(again), 8), strict=True))
    assert "has 4 data-parallel ranks" in two.load_resharded([state])
    rank = loader(texts, tokenizer, 1, 2)
    rank.load_resharded([state])
    assert torch.equal(take(iter(rank), 1)[0], take(iter(two), 2)[1])


def test_a_mismatched_position_is_refused(texts: Path, tokenizer: Any, tmp_path: Path) -> None:
    state = loader(texts, tokenizer, 0, 2).state_dict()
    one = loader(texts, tokenizer, 0, 1)
    with pytest.raises(ValueError, match="positions of 2 data-parallel ranks, this run has 1"):
        one.load_state_dict(state)
    with pytest.raises(ValueError, match="no data position dp_rank_1"):
        one.load_resharded([state])
    with pytest.raises(ValueError, match="no data position at all"):
        one.load_resharded([])
    for damaged in (
        "",
        "[]",
        '{"format": 2}',
        state["dp_rank_0"].replace('"tokens": [', '"tokens": ["a"'),
        b"\x80\x04N.",
    ):
        with pytest.raises(ValueError, match=r"is not readable.*exclude_from_loading=dataloader"):
            one.load_state_dict({"dp_rank_0": damaged, "world_size": 1})
    with pytest.raises(ValueError, match="text_files with 40 documents or files, this run's text_files with 5"):
        loader(texts / "1.jsonl", tokenizer, 0, 2).load_state_dict(state)


@pytest.mark.parametrize("whole", [loading.WHOLE, 0])
def test_other_data_of_the_same_size_are_refused(
    whole: int, texts: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "WHOLE", whole)  # with 0 the documents are sampled
    state = loader(texts, tokenizer, 0, 1).state_dict()
    for file in texts.glob("*.jsonl"):
        (texts / "other").mkdir(exist_ok=True)
        (texts / "other" / file.name).write_text(file.read_text().replace("<17>", "<71>"))
    other = loader(texts / "other", tokenizer, 0, 1)
    for load in (other.load_state_dict, lambda state: other.load_resharded([state])):
        with pytest.raises(ValueError, match=r"another text: [0-9a-f]{16}, .*exclude_from_loading=dataloader") as error:
            load(state)
        assert "\n" not in str(error.value)


def test_another_tokenizer_is_refused(texts: Path, tokenizer: Any, tmp_path: Path) -> None:
    state = loader(texts, tokenizer, 0, 1).state_dict()
    definition = json.loads(tokenizer.tokenizer.to_str())
    vocabulary = definition["model"]["vocab"]
    a, b = list(vocabulary)[70:72]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    other = copy.copy(tokenizer)
    other.tokenizer = type(tokenizer.tokenizer).from_str(json.dumps(definition))
    with pytest.raises(ValueError, match="another tokenizer: "):
        loader(texts, other, 0, 1).load_state_dict(state)


def test_a_stream_is_identified_by_its_files(tmp_path: Path) -> None:
    def digest(folder: str, documents: list[str]) -> str:
        file = tmp_path / folder / "a.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        return loading.data_digest(load_dataset("json", data_files=[str(file)], split="train", streaming=True))

    first = digest("a", ["one", "two"])
    assert len(first) == 16 and digest("a", ["one", "two", "three"]) == first != digest("b", ["one", "two"])
    assert loading.data_digest(Dataset.from_dict({"tokens": [1]})) == ""


def test_a_share_without_a_token_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["spam"] * 6 + [""] * 6))
    assert take(iter(loader(path, tokenizer, 0, 2)), 3)
    with pytest.raises(NoTextError, match=r"^text_files: the share of .* reader 1 of 2 has no token in a whole epoch"):
        take(iter(loader(path, tokenizer, 1, 2)), 3)
    assert take(iter(loader(path, tokenizer, 1, 2, epochs=1)), 3) == []


def test_a_limited_number_of_epochs(texts: Path, tokenizer: Any) -> None:
    encoder = BoundaryTokenizer(tokenizer, "bos_eos")

    def sequences(epochs: int) -> int:
        data = TextDataLoader("text_files", str(texts), encoder, 16, passes=epochs)
        total, state = 0, data.state_dict()
        for _ in data.sequences():
            total += 1
            if total == 151:
                state = data.state_dict()
        if total > 151:  # A resumed run ends at the same point.
            other = BoundaryTokenizer(tokenizer, "bos_eos")
            again = TextDataLoader("text_files", str(texts), other, 16, passes=epochs)
            again.load_state_dict(state)
            assert sum(1 for _ in again.sequences()) == total - 151
            again.load_state_dict(data.state_dict())
            assert sum(1 for _ in again.sequences()) == 0
        return total

    one, three = sequences(1), sequences(3)
    assert 3 * one <= three <= 3 * one + 2


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 8))
def test_parts_of_ranges_are_equal_and_whole(lengths: list[int], world: int) -> None:
    begins = [20 * i for i in range(len(lengths))]
    ranges = [[begin, begin + n] for begin, n in zip(begins, lengths, strict=True)]
    parts = [
        [i for begin, end in _split_ranges(ranges, rank, world) for i in range(begin, end)] for rank in range(world)
    ]
    assert [i for part in parts for i in part] == [i for begin, end in ranges for i in range(begin, end)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("world", [1, 3, 7])
def test_shares_are_those_of_the_datasets_library(world: int) -> None:
    """Runs read the same documents in the same order as with TorchTitan's own dataset."""
    data = Dataset.from_dict({"i": list(range(N))})
    for rank in range(world):
        shard = data.shard(world, rank, contiguous=True)
        assert _split_ranges([[0, N]], rank, world) == [[shard[0]["i"], shard[-1]["i"] + 1]]
