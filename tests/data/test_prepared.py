"""Prepared data in training: order of samples, assignment to readers, and position of a resumed run."""

import hashlib
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_indexed import literal
from tests.logs import logged
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import BYTE_TOKENIZER
from torchtitan_scape.data import prepared as splits
from torchtitan_scape.data.datasets import build_dataloader
from torchtitan_scape.data.manifest import Manifest, PairWriter, tokenizer_facts
from torchtitan_scape.data.prepared import Permutation, PreparedDataLoader, Split
from torchtitan_scape.trainer.validator import by_rows, validation_batches

S = 4  # Sequence length.
N = 61  # Number of samples.


def split(tokens: int = N * S + 2) -> Split:
    """Consecutive tokens in three shards."""
    ids = np.arange(tokens, dtype=np.uint16)
    return Split([("a", ids[:50]), ("b", ids[50:51]), ("c", ids[51:])], "digest", 60_000)


def reader(rank: int, world: int, batch: int = 2, **options: Any) -> PreparedDataLoader:
    return PreparedDataLoader(split(), batch, S, rank=rank, world=world, **{"each": 12 // (batch * world), **options})


def samples(labels: torch.Tensor) -> list[int]:
    """Return the sample numbers: sample i has the tokens from i S."""
    assert torch.equal(labels, labels[:, :1] + torch.arange(S))
    return [(first - 1) // S for first in labels[:, 0].tolist()]


# The order


def literal_permutation(n: int, key: tuple[int, ...]) -> list[int]:
    """Compute four Feistel rounds on pairs of digits, one number at a time."""
    bits = 2**64
    side = next(side for side in range(1, n + 1) if side * side >= n)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=32).digest()

    def splitmix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % bits
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % bits
        return x ^ (x >> 31)

    def rounds(number: int) -> int:
        left, right = divmod(number, side)
        for i in range(4):
            round_key = int.from_bytes(digest[8 * i : 8 * i + 8], "little")
            left, right = right, (left + splitmix((right + round_key) % bits)) % side
        return left * side + right

    found = []
    for number in range(n):
        number = rounds(number)
        while number >= n:
            number = rounds(number)
        found.append(number)
    return found


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 5))
def test_the_order_is_the_documented_permutation(n: int, seed: int, number: int) -> None:
    found = Permutation(n, seed, number)(np.arange(n)).tolist()
    assert found == literal_permutation(n, (seed, number))
    assert sorted(found) == list(range(n))


def test_orders_differ_by_pass_and_seed() -> None:
    n = 10_000
    orders = [Permutation(n, *key)(np.arange(n)) for key in ((0, 0), (0, 1), (1, 0))]
    for one, other in itertools.combinations([np.arange(n), *orders], 2):
        assert (one == other).sum() < 10  # one on average
    for order in orders:
        # The distance of neighbors is that of independent positions: a third of n on average.
        assert abs(np.abs(np.diff(order)).mean() / n - 1 / 3) < 0.02
    few = Permutation(n, 0, 0)(np.array([7, 9_999, 3]))
    assert few.tolist() == orders[0][[7, 9_999, 3]].tolist()


# Assignment to readers


def steps(readers: list[PreparedDataLoader], n: int) -> list[list[int]]:
    """Return the sorted samples of each of n global batches."""
    iterators = [iter(one) for one in readers]
    found = []
    for _ in range(n):
        batch: list[int] = []
        for one, batches in zip(readers, iterators, strict=True):
            for _, labels in itertools.islice(batches, one.each * one.simulated):
                batch += samples(labels)
        found.append(sorted(batch))
    return found


def resumed(old: list[PreparedDataLoader], new: list[PreparedDataLoader]) -> list[PreparedDataLoader]:
    states = [json.loads(json.dumps(one.state_dict())) for one in old]
    assert all(state == states[0] for state in states)
    for one in new:
        assert one.saved_state(len(old)).keys() == states[0].keys()
        assert "continuing after" in one.load_resharded(states)
    return new


def test_global_batches_are_the_same_for_every_number_of_ranks() -> None:
    """2 -> 3 -> 2 ranks, then one with six simulated replicas and other micro-batches, over more than three passes."""
    expected = steps([reader(0, 1, 12)], 18)
    readers = [reader(rank, 2) for rank in range(2)]
    found = steps(readers, 5)
    readers = resumed(readers, [reader(rank, 3) for rank in range(3)])
    found += steps(readers, 2)
    readers = resumed(readers, [reader(rank, 2, 1) for rank in range(2)])
    found += steps(readers, 6)
    readers = resumed(readers, [reader(0, 1, 1, simulated=6, each=2)])
    found += steps(readers, 5)
    assert found == expected
    # Every sample once a pass.
    flat = [sample for batch in found for sample in batch]
    assert Counter(steps([reader(0, 1, 61, each=1)], 1)[0]) == Counter(range(N))
    assert max(Counter(flat).values()) <= math.ceil(18 * 12 / N)


def test_ranks_and_simulated_replicas_read_their_assigned_rows() -> None:
    places = Permutation(N, 5, 0)(np.arange(N)).tolist()
    for rank in range(3):
        batches = iter(reader(rank, 3, 2, seed=5))
        for micro in range(2):
            _, labels = next(batches)
            begin = (micro * 3 + rank) * 2
            assert samples(labels) == places[begin : begin + 2]
    two = [iter(reader(rank, 2, 3, seed=5)) for rank in range(2)]
    one = iter(reader(0, 1, 3, seed=5, simulated=2, each=2))
    for _ in range(3):
        for batches in two:
            for _ in range(2):
                assert torch.equal(next(batches)[1], next(one)[1])


def test_labels_are_the_inputs_shifted_by_one() -> None:
    inputs, labels = next(iter(reader(0, 1)))
    assert inputs["input"].shape == labels.shape == (2, S)
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert torch.equal(inputs["input"] + 1, labels)


def test_the_steps_within_a_number_of_passes() -> None:
    one = reader(0, 2)
    assert one.steps_left(2) == 10  # 122 samples are ten batches of 12
    batches = iter(one)
    for _ in range(3 * 9):
        next(batches)
    assert one.steps_left(2) == 1 and one.steps_left(1) == 0


def test_resuming_from_the_middle_of_a_chunk(tokenizer: Any) -> None:
    first = reader(1, 2)
    batches = iter(first)
    for _ in range(9):
        next(batches)
    again = resumed([first], [reader(1, 2)])[0]
    for (_, one), (_, other) in zip(itertools.islice(batches, 50), again, strict=False):
        assert torch.equal(one, other)
    assert first.consumed == 59 // 3 * 12


def test_mismatched_data_and_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="have 61 samples of 4 tokens in this split, fewer than a global batch of 64"):
        PreparedDataLoader(split(), 16, S, world=2, each=2)
    state = reader(0, 1).state_dict()
    for old, new, message in (
        ('"digest"', '"other"', "with data = other, but this run has digest"),
        ('"seq_len": 4', '"seq_len": 8', "with seq_len = 8, but this run has 4"),
        ('"format": 1', '"format": 2', "with format = 2"),
    ):
        with pytest.raises(ValueError, match=message):
            reader(0, 1).load_state_dict({"position": state["position"].replace(old, new)})
    for text in ("", "[]", "{}", state["position"].replace('"consumed": 0', '"consumed": -1')):
        with pytest.raises(ValueError, match=r"is not readable; .*exclude_from_loading=dataloader"):
            reader(0, 1).load_state_dict({"position": text})
    small = Split([("dir/train-00000", np.array([1, 2, 300, 4, 5], np.uint16))], "digest", 300)
    with pytest.raises(ValueError, match=r"dir/train-00000\.bin has a token 300 near number 0, .* 300 entries"):
        next(iter(PreparedDataLoader(small, 1, S)))


# From files


def prepared(folder: Path, tokenizer: Any, tokens: int = 200, validation: int = 38) -> Path:
    """Write two shards for training and one for validation, of bytes."""
    (folder / "parts").mkdir(parents=True)
    facts = tokenizer_facts(BYTE_TOKENIZER, tokenizer)
    shards = []
    for name, n in (("train-00000", tokens), ("train-00001", 77), ("validation-00000", validation)):
        writer = PairWriter(folder / "parts", name, name.split("-")[0], np.dtype("<u2"))
        writer.add([i % 250 + 2 for i in range(n)], [n], 3 * n)
        shards += filter(None, [writer.finish(folder)])
    head = {"dataset": "made up"}, facts, "bos_eos", "uint16", 100, 0.1
    Manifest(*head, tuple(shards)).write(folder)  # type: ignore[arg-type]
    return folder


def config_of(path: Path, **validation: Any) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = str(BYTE_TOKENIZER)
    config.training.dataset = config.validation.dataset = "prepared"
    config.training.dataset_path = config.validation.dataset_path = str(path)
    config.training.local_batch_size, config.training.seq_len = 3, 8
    config.validation.local_batch_size, config.validation.seq_len, config.validation.steps = 3, 4, -1
    for key, value in validation.items():
        setattr(config.validation, key, value)
    return config


def test_prepared_data_are_read_and_resumed(tmp_path: Path, tokenizer: Any) -> None:
    config = config_of(prepared(tmp_path / "data", tokenizer))
    config.training.global_batch_size, config.debug.seed = 12, 7
    loader = build_dataloader(2, 1, tokenizer, config)
    assert isinstance(loader, PreparedDataLoader)
    assert (loader.samples, loader.each, loader.seed, loader.data.bytes_per_token) == (34, 2, 7, 3.0)
    assert json.loads(loader.state_dict()["position"]) == {
        "format": 1,
        "data": Manifest.digest(tmp_path / "data"),
        "samples": 34,
        "seq_len": 8,
        "seed": 7,
        "consumed": 0,
    }
    assert next(iter(loader))[1].shape == (3, 8)


def test_data_of_earlier_versions_are_read(tmp_path: Path, tokenizer: Any) -> None:
    config = config_of(prepared(tmp_path / "data", tokenizer))
    path = tmp_path / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        shard["special_documents"] = 1
    path.write_text(json.dumps(manifest | {"allow_special_tokens": False}))
    assert next(iter(build_dataloader(1, 0, tokenizer, config)))[1].shape == (3, 8)


def test_a_megatron_pair_is_read(tmp_path: Path, tokenizer: Any) -> None:
    documents = [[i % 250 for i in range(n)] for n in (5, 40, 3)]
    config = config_of(literal(tmp_path / "my.data", documents), dataset="standard_library_validation")
    loader = build_dataloader(1, 0, tokenizer, config)
    assert isinstance(loader, PreparedDataLoader) and loader.data.tokens == 48
    assert loader.data.read(3, 7).tolist() == [3, 4, 0, 1]
    digest = loader.data.digest
    config.training.dataset_path += ".idx"
    assert build_dataloader(1, 0, tokenizer, config).data.digest == digest  # type: ignore[union-attr]


def replace(folder: Path, old: str, new: str) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda f, c: (f / "train-00001.bin").unlink(),
            r"the prepared data are damaged: .*train-00001\.bin is missing",
        ),
        (
            lambda f, c: (f / "train-00001.idx").write_bytes(b"short"),
            r"damaged: .*train-00001\.idx has 5 bytes, 62 expected",
        ),
        (
            lambda f, c: (f / "manifest.json").unlink(),
            r"has no manifest\.json: it contains no prepared data, or they are unfinished",
        ),
        (lambda f, c: (f / "manifest.json").write_text("{"), r"manifest\.json cannot be read"),
        (
            lambda f, c: (f / "manifest.json").write_text('{"format":' + "[" * 100_000),
            r"manifest\.json cannot be read \(its JSON is nested too deeply\)",
        ),
        (
            lambda f, c: replace(f, '"train-00000"', '"../train-00000"'),
            r"names the file '\.\./train-00000', which is not in its folder",
        ),
        (
            lambda f, c: replace(f, '"digest"', '"digests"'),
            r"manifest\.json cannot be read \(its tokenizer lacks digest\)",
        ),
        (
            lambda f, c: replace(f, '"entries": 258', '"entries": 300'),
            "with another tokenizer than the one in .*: its entries is 300, not 258",
        ),
        (lambda f, c: setattr(c.data, "border", "eos"), "set .data. border = 'bos_eos', or .* --border eos"),
        (lambda f, c: setattr(c.training, "dataset_path", None), "training.dataset_path: dataset 'prepared' needs"),
        (
            lambda f, c: setattr(c.training, "dataset_path", str(f / "no")),
            "neither a folder of prepared data nor a pair",
        ),
        (lambda f, c: setattr(c.training, "local_batch_size", 40), "34 samples of 8 tokens .* global batch of 40"),
    ],
)
def test_mismatched_data_are_one_line(change: Any, message: str, tmp_path: Path, tokenizer: Any) -> None:
    folder = prepared(tmp_path / "data", tokenizer)
    config = config_of(folder)
    change(folder, config)
    with pytest.raises(ValueError, match=message) as error:
        build_dataloader(1, 0, tokenizer, config)
    assert "\n" not in str(error.value)


def test_an_unreadable_shard_is_one_line(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, dtype: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(splits, "map_tokens", forbidden)
    with pytest.raises(
        ValueError, match=r"training\.dataset_path: .*train-00000\.bin cannot be read: Permission denied"
    ):
        build_dataloader(1, 0, tokenizer, config_of(prepared(tmp_path / "data", tokenizer)))


@pytest.mark.parametrize("other", ["", ".bin"])
def test_a_pair_has_no_splits(other: str, tmp_path: Path, tokenizer: Any) -> None:
    config = config_of(literal(tmp_path / "pair", [[1] * 100]), enable=True)
    config.validation.dataset_path = f"{config.training.dataset_path}{other}"
    with pytest.raises(ValueError, match=r"is a pair, which has no splits: use a separate pair"):
        build_dataloader(1, 0, tokenizer, config)


def test_the_position_of_a_pair_belongs_to_its_tokens(tmp_path: Path, tokenizer: Any) -> None:
    """The index of another pair with as many tokens is equal."""
    one = build_dataloader(1, 0, tokenizer, config_of(literal(tmp_path / "one", [[1] * 100])))
    other = build_dataloader(1, 0, tokenizer, config_of(literal(tmp_path / "other", [[1] * 99 + [2]])))
    state = one.state_dict()
    with pytest.raises(ValueError, match=r"data = .*; use the same data"):
        other.load_state_dict(state)


# Validation


def rows(batches: Any) -> list[list[int]]:
    return [row for _, labels in batches for row in labels.tolist()]


@pytest.mark.parametrize("world, simulated", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_whole_split_is_read_in_equal_shares(world: int, simulated: int, tmp_path: Path, tokenizer: Any) -> None:
    """38 tokens are nine samples of four and one token more."""
    config = config_of(prepared(tmp_path / "data", tokenizer))
    found = [validation_batches(config, world, rank, tokenizer, simulated) for rank in range(world)]
    share = 9 // (world * simulated)
    assert all(one.rows == found[0].rows and one.bytes_per_token == 3.0 for one in found)
    read = sorted(row for one in found for row in rows(one))
    assert read == [[i % 250 + 2 for i in range(4 * n + 1, 4 * n + 5)] for n in range(share * world * simulated)]
    assert rows(found[0]) == rows(found[0])


def test_a_number_of_batches_or_all_text(tmp_path: Path, tokenizer: Any) -> None:
    folder = prepared(tmp_path / "data", tokenizer)
    two = [validation_batches(config_of(folder, steps=1), 2, rank, tokenizer, 1) for rank in range(2)]
    whole = rows(validation_batches(config_of(folder), 1, 0, tokenizer, 1))
    assert [rows(one) for one in two] == [whole[:3], whole[3:6]]
    assert [one.bytes_per_token for one in two] == [None, None]  # Those of the split are not those of its beginning.
    with pytest.raises(ValueError, match=r"has 9 samples of 4 tokens, and validation\.steps = 2 needs 12"):
        validation_batches(config_of(folder, steps=2), 2, 0, tokenizer, 1)
    with pytest.raises(ValueError, match=r"set validation\.steps to at most 1, or to -1 for the whole split"):
        validation_batches(config_of(folder, steps=2), 2, 0, tokenizer, 1)
    with pytest.raises(ValueError, match="less than one sequence for each of 10 readers"):
        validation_batches(config_of(folder), 10, 0, tokenizer, 1)
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i}" * 10}) + "\n" for i in range(7)))
    config = config_of(text, dataset="text_files")
    # Twelve bytes a document, sequences of five tokens: four documents are 9 sequences, three are 7 and get the ninth.
    with logged() as messages:
        found = validation_batches(config, 1, 0, tokenizer, 2)
    assert found.rows == [3, 3, 2, 3, 3, 2] and found.bytes_per_token is None
    assert [tokenizer.decode(row) for row in rows(found)][-2:] == ["6666", "3333"]
    # The ends of both shares, which fill no sequence, are left out: 48 - 9 * 5 and 36 - 7 * 5 tokens.
    assert messages[-1].endswith("16 sequences, 8 per reader; 0 sequences and 4 tokens are left over")
    assert len(rows(validation_batches(config, 1, 0, tokenizer, 1))) == 16


@pytest.mark.parametrize(
    "readers, fix",
    [
        (9, {"steps": -1}),  # a sequence for each reader, but no full batch
        (12, {"steps": -1, "seq_len": 3}),  # less than a sequence for each
    ],
)
def test_the_advice_for_a_small_split_works(readers: int, fix: dict[str, int], tmp_path: Path, tokenizer: Any) -> None:
    folder = prepared(tmp_path / "data", tokenizer)
    advice = " and ".join(f"validation.{key} (= |to at most ){value}" for key, value in fix.items())
    with pytest.raises(ValueError, match=f"; set {advice}.* prepare --validation"):
        validation_batches(config_of(folder, steps=1), readers, 0, tokenizer, 1)
    config = config_of(folder, steps=fix["steps"])
    config.validation.seq_len = fix.get("seq_len", config.validation.seq_len)
    assert len(validation_batches(config, readers, 0, tokenizer, 1)) == 1
    empty = prepared(tmp_path / "empty", tokenizer, validation=0)
    with pytest.raises(
        ValueError, match=r"0 samples .* needs .*; hold out more documents with prepare --validation, or"
    ):
        validation_batches(config_of(empty, steps=1), readers, 0, tokenizer, 1)


def test_the_loss_of_a_whole_split_is_the_mean_over_its_tokens() -> None:
    batches = [torch.arange(6.0).view(3, 2), torch.tensor([[9.0, 11.0]])]
    loss = by_rows(lambda predictions, labels: predictions.sum(), [3, 1])
    # TorchTitan's mean of the batches' means.
    means = [loss(batch, batch) / batch.numel() for batch in batches]
    assert float(sum(means) / 2) == pytest.approx(float(torch.cat(batches).mean()))
    plain = lambda predictions, labels: predictions  # noqa: E731
    assert by_rows(plain, [3, 3]) is plain
