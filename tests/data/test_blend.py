"""Blends: shares at every point of the order, one order for any number of readers, exact resume, and messages."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_indexed import literal
from tests.data.test_prepared import config_of
from torchtitan_scape.data.datasets import build_dataloader
from torchtitan_scape.data.prepared import PERIOD, Blend, PreparedDataLoader, Split, blend_of

S = 4


def part(samples: int, base: int) -> Split:
    """Return samples of equal tokens: sample i consists of base + i."""
    ids = np.repeat(np.arange(base, base + samples, dtype=np.uint16), S)
    return Split([(f"{base}", np.append(ids, ids[-1:]))], f"digest {base}", 60_000)


def blend() -> Blend:
    return Blend([(3.0, part(20, 100)), (1.0, part(9, 200))])


def first_tokens(loader: PreparedDataLoader, batches: int) -> list[int]:
    iterator = iter(loader)
    return [int(row[0]) for _ in range(batches) for row in next(iterator)[0]["input"]]


def test_shares_are_exact_at_every_point() -> None:
    weights = (0.61, 0.3, 0.0899, 0.0001)
    found = Blend([(w, part(50, 100 * i)) for i, w in enumerate(weights)])
    assert found.counts.sum() == PERIOD and np.abs(found.counts / PERIOD - np.array(weights)).max() < 1 / PERIOD
    sets = found._set
    for number, count in enumerate(found.counts):
        behind = np.cumsum(sets == number) - np.arange(1, PERIOD + 1) * count / PERIOD
        assert np.abs(behind).max() < len(weights) - 1


def test_every_set_is_read_pass_by_pass_in_its_own_order() -> None:
    found = blend()
    order = found.ordered(np.arange(2 * PERIOD + 320), S, 7)  # beyond a period
    for begin, n, each in ((0, 20, 3), (20, 9, 1)):
        own = order[(begin <= order) & (order < begin + n)]
        assert len(own) == each * (2 * PERIOD + 320) // 4
        passes = [own[i : i + n].tolist() for i in range(0, len(own) - n, n)]
        assert all(sorted(one) == list(range(begin, begin + n)) for one in passes)
        assert passes[0] != passes[1]
    shuffled = np.random.default_rng(0).permutation(200).reshape(20, 10)
    assert (found.ordered(shuffled, S, 7) == order[shuffled]).all()


@pytest.mark.parametrize("world, simulated", [(1, 1), (3, 1), (2, 3), (1, 6)])
def test_the_global_batch_and_the_resumed_one_are_equal_for_all_readers(world: int, simulated: int) -> None:
    def read(consumed_by: list[dict[str, Any]]) -> tuple[Counter[int], list[dict[str, Any]]]:
        options: dict[str, Any] = {"seed": 5, "world": world, "simulated": simulated, "each": 6 // (world * simulated)}
        tokens, states = Counter[int](), []
        for rank in range(world):
            loader = PreparedDataLoader(blend(), 2, S, rank=rank, **options)
            if consumed_by:
                loader.load_resharded(consumed_by)
            tokens.update(first_tokens(loader, 2 * loader.each * simulated))
            states.append(loader.state_dict())
        return tokens, states

    one = PreparedDataLoader(blend(), 12, S, seed=5)
    tokens, states = read([])
    assert tokens == Counter(first_tokens(one, 2)) and all(state == one.state_dict() for state in states)
    assert read(states)[0] == Counter(first_tokens(one, 2))
    other = PreparedDataLoader(Blend([(2.0, part(20, 100)), (1.0, part(9, 200))]), 12, S, seed=5)
    with pytest.raises(ValueError, match="refers to prepared data with data = "):
        other.load_state_dict(states[0])


def test_a_blend_is_configured_by_dataset_path(tmp_path: Path, tokenizer: Any) -> None:
    for name, token in (("web", 1), ("my code", 2)):
        literal(tmp_path / name, [[token] * 100])
    config = config_of(tmp_path)
    path = config.training.dataset_path = f"0.75 {tmp_path}/web, 0.25 {tmp_path}/my code.bin"
    loader = build_dataloader(1, 0, tokenizer, config)
    assert isinstance(loader, PreparedDataLoader)
    config.validation.dataset_path = f"{tmp_path}/my code"
    config.validation.enable = True
    assert Counter(first_tokens(loader, 4)) == {1: 9, 2: 3}
    with pytest.raises(ValueError, match="use a separate pair or another dataset for validation"):
        build_dataloader(1, 0, tokenizer, config)
    config.validation.enable = False
    for key, value, message in (
        ("dataset_path", path.replace("0.25", "-1"), "write a weight and a path for each set"),
        ("dataset_path", path.replace("0.25 ", ""), "write a weight and a path for each set"),
        ("dataset_path", path.replace("0.25", "1e-9"), "the smallest weight is below 1/65,536"),
        ("dataset_path", path + " no", "neither a folder of prepared data nor a pair"),
        ("seq_len", 100, "web has no sample of 100 tokens"),
    ):
        broken = config_of(tmp_path)
        broken.training.dataset_path = path
        setattr(broken.training, key, value)
        with pytest.raises(ValueError, match=message) as error:
            build_dataloader(1, 0, tokenizer, broken)
        assert "\n" not in str(error.value)
    config.data.epochs = 1
    with pytest.raises(ValueError, match=r"set training\.steps instead"):
        build_dataloader(1, 0, tokenizer, config)


def test_a_path_with_a_comma_is_literal(tmp_path: Path) -> None:
    (tmp_path / "0.5 a,0.5 b").mkdir()
    assert blend_of(str(tmp_path / "0.5 a,0.5 b")) == [(1.0, str(tmp_path / "0.5 a,0.5 b"))]
    assert blend_of("0.5 a,0.5 b") == [(0.5, "a"), (0.5, "b")]
