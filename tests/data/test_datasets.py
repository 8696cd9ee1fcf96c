"""Datasets, tokenizer and validator as TorchTitan builds them."""

import errno
import gzip
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import EMBEDDED_TOKENIZER, local
from torchtitan_scape.data import datasets as ours
from torchtitan_scape.data.encoding import BoundaryTokenizer
from torchtitan_scape.data.loader import TextDataLoader
from torchtitan_scape.titan.tokenizer import build_tokenizer
from torchtitan_scape.trainer import validator

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12345\n"
TEXTS = [f"Document {i}: " + "spam and eggs, " * 20 for i in range(6)]
ROWS = [{"text": text, "meta": i} for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(_config())


def _config(dataset: str = "standard_library", path: Path | None = None) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = str(EMBEDDED_TOKENIZER)
    config.training.dataset = dataset
    config.training.dataset_path = None if path is None else str(path)
    config.training.local_batch_size = 3
    config.training.seq_len = 32
    config.validation.dataset = "standard_library_validation"
    config.validation.local_batch_size = 2
    config.validation.seq_len = 16
    config.validation.steps = 3
    return config


def _jsonl(path: Path, rows: list[Any] | None = None) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in (ROWS if rows is None else rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return path


def _parquet(path: Path, rows: list[Any] | None = None, keep: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = Dataset.from_list(ROWS if rows is None else rows).data.table
    pyarrow.parquet.write_table(table.slice(0, keep), path)
    return path


def _txt(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text + "\n\nSecond paragraph.\n")
    return folder


# Tokenizer


def test_tokenizer_knows_its_special_tokens(tokenizer: Any) -> None:
    assert tokenizer.get_vocab_size() == 4096
    ids = tokenizer.encode("def f():\n    return 'é'\n", add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.decode(ids[1:-1]) == "def f():\n    return 'é'\n"
    assert tokenizer.encode("a")[0] != tokenizer.bos_id


def test_tokenizer_folder_is_checked(tmp_path: Path) -> None:
    config = _config()
    config.model.hf_assets_path = str(tmp_path / "none")
    with pytest.raises(ValueError, match=r"none' is not a folder; expected .*tokenizer\.json"):
        build_tokenizer(config)
    config.model.hf_assets_path = str(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no tokenizer; expected tokenizer\.json"):
        build_tokenizer(config)


# Local text


def test_formats_give_batches_of_the_right_shape(tmp_path: Path, tokenizer: Any) -> None:
    paths = [
        _jsonl(tmp_path / "a.jsonl"),
        _jsonl(tmp_path / "b.json.gz"),
        _jsonl(tmp_path / "sub" / "deep" / "c.jsonl.gz").parents[1],
        _parquet(tmp_path / "d.parquet"),
        _txt(tmp_path / "txt"),
    ]
    for path in paths:
        data = TextDataLoader("text_files", str(path), BoundaryTokenizer(tokenizer, "bos_eos"), seq_len=32)
        assert data._data.size() == len(TEXTS)
        inputs, labels = next(data.sequences())
        assert inputs["input"].shape == labels.shape == (32,)
        assert inputs["input"].dtype == labels.dtype == torch.int64
        assert inputs["input"][0] == tokenizer.bos_id
        assert torch.equal(inputs["input"][1:], labels[:-1])
        assert tokenizer.decode(inputs["input"][1:].tolist()).startswith("Document 0: spam")
    inputs, labels = next(iter(ours.build_dataloader(2, 0, tokenizer, _config("Text_Files", paths[0]))))
    assert inputs["input"].shape == labels.shape == (3, 32)


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    data = ours.load_text_files(_txt(tmp_path))
    assert data[0]["text"] == TEXTS[0] + "\n\nSecond paragraph.\n"


def test_files_without_rows_are_skipped(tmp_path: Path) -> None:
    """The datasets library fails on a parquet file of zero rows."""
    _parquet(tmp_path / "a.parquet", keep=0)
    _parquet(tmp_path / "b.parquet")
    assert ours.load_text_files(tmp_path)["text"][:] == TEXTS


def test_empty_documents_are_skipped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    """They would consist of BOS and EOS only."""
    rows = [{"text": text} for text in (None, "", *TEXTS * 3)]
    loader = ours.build_dataloader(1, 0, tokenizer, _config("text_files", _parquet(tmp_path / "a.parquet", rows)))
    inputs, _ = next(iter(loader))
    assert tokenizer.decode(inputs["input"][0][1:].tolist()).startswith("Document 0: spam")
    assert loader.empty_documents() == 2


@pytest.mark.parametrize("layout", ["{split}-00000.parquet", "data/{split}-00000.parquet", "{split}/0.parquet"])
def test_a_local_copy_of_a_hub_set_is_split_by_name(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "training_data"  # the nearest name decides, not this one
    for i, split in enumerate(("train", "validation", "test")):
        _parquet(root / layout.format(split=split), ROWS[i : i + 1])
    for name, text in (("slimpajama_6b", TEXTS[0]), ("slimpajama_6b_validation", TEXTS[1])):
        assert ours.DATASETS[name].loader(str(root))["text"][:] == [text]
    assert len(ours.DATASETS["text_files"].loader(str(root))) == 3


def _unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def denied(path: Path) -> Any:  # Simulated, because the superuser may read everything.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(local, "open_lines", denied)
    return _jsonl(tmp_path / "a.jsonl")


def _linked(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path.parent


def _unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b").mkdir()
    real = os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return tmp_path


def _written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


MISTAKES = {
    "missing": (lambda t, m: t / "none", r"none' does not exist; expected .*\.jsonl"),
    "unreadable": (_unreadable, r"a\.jsonl' cannot be read as json: .*Permission denied"),
    "no supported file": (
        lambda t, m: _written(t / "a.csv", "text\nx\n").parent,
        r"has no text; expected .*\.jsonl",
    ),
    "unsupported file": (
        lambda t, m: _written(t / "a.csv", "text\nx\n"),
        r"a\.csv' has no text; expected .*\.jsonl",
    ),
    "blank lines": (lambda t, m: _written(t / "a.jsonl", "\n\n"), "has zero documents"),
    "empty files": (lambda t, m: _written(t / "a.jsonl", ""), "has zero documents"),
    "no rows": (lambda t, m: _parquet(t / "a.parquet", []), r"has no column 'text', but \[\]"),
    "zero documents": (
        lambda t, m: _parquet(t / "a.parquet", ROWS, keep=0),
        r"a\.parquet' has zero documents",
    ),
    "UTF-16": (
        lambda t, m: (t / "a.jsonl").write_bytes('{"text": "x"}\n'.encode("utf-16")) and t / "a.jsonl",
        r"a\.jsonl' cannot be read as json: it is UTF-16 .* iconv -t UTF-8",
    ),
    "a link that leads nowhere": (
        lambda t, m: _linked(_jsonl(t / "a.jsonl").with_name("b"), t / "gone"),
        r"the link .*/b leads to .*/gone, which does not exist; restore that, or delete the link",
    ),
    "an unreadable folder": (_unreadable_folder, r"the folder .*/b cannot be read \(Permission denied\)"),
    "a pointer of Git LFS": (
        lambda t, m: _written(t / "a.txt", POINTER),
        r"a\.txt is a Git LFS pointer, not the file itself; run git lfs pull",
    ),
    "damaged parquet": (
        lambda t, m: _written(t / "a.parquet", "no parquet"),
        r"a\.parquet' cannot be read as",
    ),
}


@pytest.mark.parametrize("make, message", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_bad_path_is_one_line_that_names_it(
    make: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    path = make(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=message) as error:
        ours.build_dataloader(1, 0, tokenizer, _config("text_files", path))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_split_is_an_error(tmp_path: Path) -> None:
    _parquet(tmp_path / "train-0.parquet")
    with pytest.raises(ValueError, match="no files of the split 'validation'"):
        ours.DATASETS["slimpajama_6b_validation"].loader(str(tmp_path))


# Data loader


def test_text_files_needs_a_path(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="text_files needs dataset_path"):
        ours.build_dataloader(1, 0, tokenizer, _config("text_files"))


def test_an_unknown_name_lists_the_known(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"dataset 'pile' is unknown; known are prepared, .*standard_library"):
        ours.build_dataloader(1, 0, tokenizer, _config("pile"))


def test_ranks_read_different_text(tokenizer: Any) -> None:
    first, second = (next(iter(ours.build_dataloader(2, rank, tokenizer, _config()))) for rank in range(2))
    assert first[0]["input"].shape == second[0]["input"].shape == (3, 32)
    assert not torch.equal(first[0]["input"], second[0]["input"])


# Validation


def test_fixed_batches_are_the_same_twice() -> None:
    source = (({"input": torch.tensor([i])}, torch.tensor([i + 1])) for i in range(5))
    batches = validator.FixedBatches(source, 3)
    assert len(batches) == 3
    for _ in range(2):
        seen = []
        for inputs, labels in batches:
            seen.append((inputs["input"].item(), labels.item()))
            inputs["input"].zero_()  # Changes to a batch must not affect the next pass.
            inputs["input"] = torch.tensor([-1])
            labels.zero_()
        assert seen == [(0, 1), (1, 2), (2, 3)]
    assert next(source)[1].item() == 4  # Only the stored batches were read.


def test_fixed_batches_need_enough_data() -> None:
    with pytest.raises(ValueError, match="3 batches requested, but the dataset has 0"):
        validator.FixedBatches([], 3)


class _Metrics:
    """The attributes of TorchTitan's MetricsProcessor that validation uses."""

    def __init__(self) -> None:
        self.ntokens_since_last_log = 1000
        self.time_last_log = time.perf_counter() - 2.0
        self.logged: list[tuple[float, int, int, float]] = []

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        seconds = time.perf_counter() - self.time_last_log
        self.logged.append((loss, step, self.ntokens_since_last_log, seconds))
        self.ntokens_since_last_log = 0
        self.time_last_log = time.perf_counter()


class _Slow(torch.nn.Module):
    """Logits that favor the input token; each batch takes 20 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        self.seen.append(tokens.clone())
        return torch.nn.functional.one_hot(tokens, 4096).float()


def _validator(tokenizer: Any, config: JobConfig | None = None, **kwargs: Any) -> validator.FixedValidator:
    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    arguments = {
        "job_config": config or _config(),
        "dp_world_size": 1,
        "dp_rank": 0,
        "tokenizer": tokenizer,
        "parallel_dims": SimpleNamespace(
            dp_enabled=False,
            cp_enabled=False,
            pp_enabled=False,
            dp_cp_enabled=False,
            cp=1,
            get_optional_mesh=lambda name: None,
        ),
        "loss_fn": loss_fn,
        "validation_context": nullcontext,
        "maybe_enable_amp": nullcontext(),
        "metrics_processor": _Metrics(),
        "pp_schedule": None,
        "pp_has_first_stage": None,
        "pp_has_last_stage": None,
    }
    return validator.FixedValidator(**arguments | kwargs)


def test_two_validations_read_the_same_text(tokenizer: Any) -> None:
    metrics, model = _Metrics(), _Slow()
    model.get_attention_masks = lambda input_batch: None  # type: ignore[method-assign]  # TypeError, as TorchTitan's
    validator = _validator(tokenizer, metrics_processor=metrics)
    assert validator.last_loss is None
    assert validator.last_step == 0

    validator.validate([model], 1)
    first = validator.last_loss
    assert first is not None
    assert validator.last_step == 1
    assert model.training
    validator.validate([model], 10)
    assert validator.last_loss == first
    assert validator.last_step == 10
    assert [entry[:2] for entry in metrics.logged] == [(first, 1), (first, 10)]
    assert len(model.seen) == 6
    assert all(torch.equal(a, b) for a, b in zip(model.seen[:3], model.seen[3:], strict=True))
    assert not torch.equal(model.seen[0], model.seen[1])


def test_validation_does_not_change_the_training_throughput(tokenizer: Any) -> None:
    """TorchTitan's validator counts its tokens as training tokens and discards the count before it."""
    metrics, model = _Metrics(), _Slow()
    model.get_attention_masks = lambda input_batch: None  # type: ignore[method-assign]
    validator = _validator(tokenizer, metrics_processor=metrics)
    before = time.perf_counter() - metrics.time_last_log
    start = time.perf_counter()
    validator.validate([model], 1)
    validating = time.perf_counter() - start
    after = time.perf_counter() - metrics.time_last_log
    _, _, n_tokens, seconds = metrics.logged[0]
    assert n_tokens == 3 * 2 * 16
    assert 0.06 <= seconds <= validating
    assert metrics.ntokens_since_last_log == 1000
    assert 2.0 <= after < before + validating - 0.05


@pytest.mark.parametrize("steps", [-2, 0])
def test_validation_needs_a_number_of_steps(steps: int, tokenizer: Any) -> None:
    config = _config()
    config.validation.steps = steps
    with pytest.raises(ValueError, match=rf"validation\.steps: {steps}; give the number of batches, e\.g\. 10, or -1"):
        _validator(tokenizer, config)


def test_an_unknown_name_of_validation_data_lists_the_known(tokenizer: Any) -> None:
    config = _config()
    config.validation.dataset = "pile"
    with pytest.raises(ValueError, match="dataset 'pile' is unknown"):
        _validator(tokenizer, config)
