"""Folders of several files: formats, columns, and kinds of arrow files."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.datasets import DATASETS, build_dataloader
from torchtitan_scape.data.local import load_text_files
from torchtitan_scape.data.prepare import TextSource
from torchtitan_scape.titan.tokenizer import build_tokenizer
from torchtitan_scape.trainer.validator import validation_batches

TEXTS = ["one", "two", "three"]


def write(path: Path, **columns: Any) -> Path:
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return path
    make = pyarrow.ipc.new_file if "file" in path.name else pyarrow.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["stream.arrow", "file.arrow"])
def test_arrow_files_of_both_forms_are_read(name: str, tmp_path: Path) -> None:
    write(tmp_path / f"a-{name}", text=TEXTS[:0])
    write(tmp_path / f"b-{name}", text=TEXTS, meta=[1, 2, 3])
    assert load_text_files(tmp_path)["text"][:] == TEXTS


def test_files_saved_by_the_library_are_read(tmp_path: Path) -> None:
    Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    assert load_text_files(tmp_path)["text"][:] == TEXTS


@pytest.mark.parametrize("splits", [False, True])
def test_files_that_map_wrote_into_a_saved_dataset_are_not_read(splits: bool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    data = Dataset.from_dict({"text": TEXTS})
    (DatasetDict(train=data) if splits else data).save_to_disk(str(folder))
    own = folder / "train" if splits else folder
    Dataset.load_from_disk(str(own)).map(lambda row: {"text": row["text"].upper()})
    assert any(file.name.startswith("cache-") for file in own.iterdir())
    assert load_text_files(tmp_path)["text"][:] == TEXTS


def test_views_of_strings_are_read(tmp_path: Path) -> None:
    """Polars writes them."""
    write(tmp_path / "a.parquet", body=pyarrow.array([*TEXTS, "a longer text than twelve"], pyarrow.string_view()))
    write(tmp_path / "b.parquet", body=TEXTS)
    data = load_text_files(tmp_path, column="body")
    assert data["text"][:] == [*TEXTS, "a longer text than twelve", *TEXTS]
    assert sum(TextSource(data, "train").sizes) == sum(map(len, data["text"]))


@pytest.mark.parametrize("name", ["a::b.txt", "a::b.parquet", "a::b.jsonl"])
def test_names_are_no_addresses(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".parquet":
        write(path, text=["one"])
    else:
        path.write_text("one" if path.suffix == ".txt" else json.dumps({"text": "one"}))
    assert load_text_files(tmp_path)["text"][:] == ["one"]


def test_a_link_to_a_file_of_the_folder_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "b.parquet", text=TEXTS)
    (tmp_path / "a.parquet").symlink_to("b.parquet")
    with caplog.at_level("WARNING"):
        assert load_text_files(tmp_path)["text"][:] == TEXTS
    assert f"{tmp_path}: links to files that are read already are left out: 1" in caplog.text


def test_columns_in_another_order_and_longer_texts_are_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", text=TEXTS, meta=[1, 2, 3])
    write(tmp_path / "b.parquet", meta=[4], text=pyarrow.array(["four"], pyarrow.large_string()))
    assert load_text_files(tmp_path)["text"][:] == [*TEXTS, "four"]


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_only_the_text_must_be_in_all_files(name: str, tmp_path: Path) -> None:
    write(tmp_path / f"a.{name}", text=TEXTS, meta=[1, 2, 3])
    write(tmp_path / f"b.{name}", text=["x"], meta=["other"])
    assert load_text_files(tmp_path)["text"][:] == [*TEXTS, "x"]
    last = write(tmp_path / f"c.{name}", body=["y"])
    with pytest.raises(ValueError, match=rf"{last}' cannot be read as {name}: it has no column 'text', but \['body'\]"):
        load_text_files(tmp_path)
    write(last, text=[1])
    with pytest.raises(ValueError, match="it has a column 'text' of int64; expected strings"):
        load_text_files(tmp_path)


def test_damaged_and_mixed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_text("no arrow")
    with pytest.raises(ValueError, match=r"a\.arrow' cannot be read as arrow"):
        load_text_files(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=r"mixes the formats arrow \(.*a\.arrow\) and json \(.*b\.jsonl\)"):
        load_text_files(tmp_path)


def test_a_part_of_the_data_is_refused_by_its_name(tmp_path: Path) -> None:
    """The hub uses this name for a conversion of the beginning of a large dataset."""
    part = tmp_path / "plain_text" / "partial-train"
    part.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), part / "0000.parquet")
    with pytest.raises(ValueError, match=r"has plain_text/partial-train/0000\.parquet, the hub's mark"):
        load_text_files(tmp_path, split="train")
    assert load_text_files(tmp_path)["text"][:] == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "stream.arrow"])
def test_the_text_may_have_another_column(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".jsonl":
        rows = zip(TEXTS, ["x", "y", "z"], strict=True)
        path.write_text("".join(json.dumps({"content": text, "text": other}) + "\n" for text, other in rows))
    else:
        write(path, content=TEXTS, text=["x", "y", "z"])
    assert load_text_files(path)["text"][:] == ["x", "y", "z"]
    assert load_text_files(path, column="content")["text"][:] == TEXTS
    with pytest.raises(
        ValueError, match=r"no column 'body', but \['content', 'text'\].*training\.text_column"
    ) as error:
        load_text_files(path, column="body")
    assert "\n" not in str(error.value)


def test_text_without_columns_refuses_the_name_of_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"text_column: 'body', but .* \.txt files, which have no columns"):
        load_text_files(tmp_path, column="body")


def test_a_missing_relative_path_is_named_with_its_folder() -> None:
    """run_train.sh changes to the repository, where a path that exists in the user's folder is missing."""
    with pytest.raises(ValueError, match=f"dataset_path: '{Path.cwd()}/my_text' does not exist"):
        load_text_files("my_text")
    config = JobConfig()
    config.model.hf_assets_path = "torchtitan_scape/data/byte_tokenizer"
    config.training.dataset, config.training.dataset_path = "prepared", "my_text"
    with pytest.raises(ValueError, match=f"training.dataset_path: '{Path.cwd()}/my_text' is neither a folder"):
        build_dataloader(1, 0, build_tokenizer(config), config)


def test_an_embedded_corpus_refuses_a_path() -> None:
    """It would train on the corpus instead of the user's text."""
    with pytest.raises(ValueError, match=r"dataset_path: 'my_text' is not read: .* set the dataset to 'text_files'"):
        DATASETS["standard_library"].loader("my_text")


@pytest.mark.parametrize("dataset", ["text_files", "standard_library"])
def test_training_and_validation_read_the_column(dataset: str, tmp_path: Path) -> None:
    """Both read the texts of `text_column`; the embedded corpus has a fixed one."""
    config = JobConfig()
    config.model.hf_assets_path = "torchtitan_scape/data/byte_tokenizer"
    config.training.dataset = config.validation.dataset = dataset
    config.training.seq_len = config.validation.seq_len = 4
    config.training.local_batch_size = config.validation.local_batch_size = 1
    config.training.text_column, config.validation.steps = "content", 1
    path = write(tmp_path / "a.parquet", content=["abcdefgh"] * 3, text=["zzzzzzzz"] * 3)
    config.training.dataset_path = config.validation.dataset_path = str(path)
    tokenizer = build_tokenizer(config)
    if dataset != "text_files":
        with pytest.raises(ValueError, match=r"text_column: 'content' is for the dataset 'text_files'"):
            build_dataloader(1, 0, tokenizer, config)
        return
    inputs, _ = next(iter(build_dataloader(1, 0, tokenizer, config)))
    expected = tokenizer.encode("abcdefgh", add_bos=True, add_eos=False)[:4]
    assert inputs["input"][0].tolist() == expected
    ((inputs, _),) = validation_batches(config, 1, 0, tokenizer, 1)
    assert inputs["input"][0].tolist() == expected
