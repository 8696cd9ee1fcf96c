"""Fixtures shared by the data tests."""

from pathlib import Path
from typing import Any

import datasets.config
import pytest

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import BYTE_TOKENIZER
from torchtitan_scape.titan.tokenizer import build_tokenizer


@pytest.fixture(autouse=True)
def _library_cache_in_tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The byte tokenizer, unless a test file overrides it."""
    return tokenizer_in(BYTE_TOKENIZER)


def tokenizer_in(folder: Path) -> Any:
    config = JobConfig()
    config.model.hf_assets_path = str(folder)
    return build_tokenizer(config)
