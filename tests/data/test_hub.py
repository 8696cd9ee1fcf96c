"""Datasets of the hub without network: a one-line error with the download command."""

import time
from pathlib import Path
from typing import Any

import datasets.config
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import constants

from torchtitan_scape.data import datasets as ours

WEB = (
    "hf download Skylion007/openwebtext --repo-type dataset --revision refs/convert/parquet --local-dir "
    "data/openwebtext"
)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "unreachable", lambda: "")


def test_a_hub_set_is_streamed(monkeypatch: pytest.MonkeyPatch, reachable: None) -> None:
    calls = []
    monkeypatch.setattr(ours, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)))
    for name in ("slimpajama_6b", "slimpajama_6b_validation", "openwebtext"):
        config = ours.DATASETS[name]
        config.loader(config.path)
    assert calls == [
        (("DKYoon/SlimPajama-6B",), {"split": "train", "streaming": True}),
        (("DKYoon/SlimPajama-6B",), {"split": "validation", "streaming": True}),
        (("Skylion007/openwebtext",), {"split": "train", "streaming": True}),
    ]


@pytest.mark.parametrize(
    "error, said",
    [
        (
            RuntimeError("Dataset scripts are no longer supported, but found x.py"),
            "its main branch is a loading script",
        ),
        (
            DatasetNotFoundError("Dataset 'x' is a gated dataset\non the Hub."),
            "it is gated (Dataset 'x' is a gated data",
        ),
        (ConnectionError("no\nnetwork"), "no network"),
        (KeyError(), "KeyError"),
    ],
)
def test_library_errors_become_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, reachable: None
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(ours, "load_dataset", fails)
    with pytest.raises(ValueError) as caught:
        ours.DATASETS["openwebtext"].loader("Skylion007/openwebtext")
    text = str(caught.value)
    assert f"Skylion007/openwebtext cannot be streamed: {said}" in text and "\n" not in text
    assert text.endswith(f"{WEB}, and here set dataset_path = 'data/openwebtext'")
    assert ("hf auth login && hf download" in text) == ("gated" in said)


def test_an_unreachable_hub_is_contacted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library itself would retry for minutes. Nothing is written."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9 cannot be reached \(.*refused.*hf download DKYoon"):
        ours.DATASETS["slimpajama_6b"].loader("DKYoon/SlimPajama-6B")
    assert time.monotonic() - begin < 10 and not list(tmp_path.iterdir())
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_repository_that_is_a_script_is_refused_by_the_library_itself(tmp_path: Path, reachable: None) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text("")
    with pytest.raises(ValueError, match="its main branch is a loading script, which the datasets library no longer"):
        ours.HubDataset("some", str(tmp_path)).stream("train")
