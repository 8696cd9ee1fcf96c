"""The prepare command: the same files for every number of workers and after every interruption."""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.data.conftest import tokenizer_in
from tests.data.test_indexed import lengths_of
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import BYTE_TOKENIZER, datasets, prepare
from torchtitan_scape.data.encoding import BoundaryTokenizer
from torchtitan_scape.data.loader import text_loader
from torchtitan_scape.data.manifest import Manifest, PairWriter, open_pair
from torchtitan_scape.titan.data import DATASETS, DatasetConfig

TEXTS = [f"<{i}> é" + "x" * (37 * i % 90) if i % 9 else "" for i in range(60)]
KEPT = [text for text in TEXTS if text]


def jsonl(folder: Path, files: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    for file in range(files):
        rows = [json.dumps({"text": text}) + "\n" for text in TEXTS[file * 60 // files : (file + 1) * 60 // files]]
        (folder / f"{file}.jsonl").write_text("".join(rows))
    return folder


def call(output: Path, *options: str, text: Path | None = None, status: int = 0) -> None:
    source = ["--path", str(text)] if text else []
    fixed = ["--tokenizer", str(BYTE_TOKENIZER), "--output", str(output), "--shard-tokens", "400"]
    assert prepare.main([*source, *fixed, "--workers", "1", *options]) == status


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def documents(folder: Path, split: str) -> list[str]:
    """Return the texts of a split, decoded from its tokens: bytes are 2 and above, BOS 0, EOS 1."""
    tokenizer, found = tokenizer_in(BYTE_TOKENIZER), []
    for shard in Manifest.read(folder).of(split):
        tokens, _ = open_pair(folder / shard.name)
        for ids in np.split(tokens, np.cumsum(lengths_of(folder / shard.name))[:-1]):
            assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            found.append(tokenizer.decode(ids[1:-1].tolist()))
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data prepared by one worker without interruption; read-only."""
    folder = tmp_path_factory.mktemp("reference")
    call(folder / "out", "--validation", "0.2", text=jsonl(folder / "text"))
    return folder


def test_every_document_is_in_one_split_and_counted(reference: Path) -> None:
    manifest = Manifest.read(reference / "out")
    train, held = documents(reference / "out", "train"), documents(reference / "out", "validation")
    assert [text for text in KEPT if text in train] == train and [text for text in KEPT if text in held] == held
    assert sorted(train + held) == sorted(KEPT) and 4 < len(held) < 20
    assert len(manifest.of("train")) > 5  # of about 400 tokens
    for split, texts in (("train", train), ("validation", held)):
        n_bytes = sum(len(text.encode()) for text in texts)
        totals = [manifest.total(split, what) for what in ("documents", "tokens", "bytes")]
        assert totals == [len(texts), n_bytes + 2 * len(texts), n_bytes]
        assert json.loads((reference / "out" / "manifest.json").read_text())["splits"][split]["bytes"] == n_bytes
    assert set(files(reference / "out")) == {"manifest.json"} | {
        f"{shard.name}{ending}" for shard in manifest.shards for ending in (".bin", ".idx")
    }


def test_equal_documents_are_in_one_split(tmp_path: Path) -> None:
    """A document that was in both splits was validated after it had been trained on."""
    rows = [json.dumps({"text": text}) + "\n" for text in KEPT[::4] * 20]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    call(tmp_path / "out", "--validation", "0.3", text=tmp_path / "a.jsonl")
    train, held = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "validation")
    assert sorted(train + held) == sorted(KEPT[::4] * 20) and train and held and not set(train) & set(held)


@pytest.mark.parametrize("border", ["bos_eos", "eos"])
def test_tokens_are_those_of_the_text_loader(border: str, tmp_path: Path, tokenizer: Any) -> None:
    text = jsonl(tmp_path / "text")
    (text / "0.jsonl").write_text('{"text": "a <|end_of_text|> b"}\n' + (text / "0.jsonl").read_text())
    call(tmp_path / "out", "--validation", "0", "--border", border, text=text)
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = "text_files", str(text)
    config.training.local_batch_size, config.training.seq_len = 1, 15
    # TorchTitan takes 16 tokens for a sequence of 15.
    loader = text_loader(config.training, "text", tokenizer, border, 0, 1, passes=1)
    read = [[*inputs["input"][0].tolist(), int(labels[0, -1])] for inputs, labels in loader]
    assert (0 in read[0]) == (border == "bos_eos") and any(1 in row for row in read)
    assert read[0].count(1) == 0
    shards = [open_pair(tmp_path / "out" / shard.name)[0] for shard in Manifest.read(tmp_path / "out").shards]
    assert [token for row in read for token in row] == np.concatenate(shards)[: 16 * len(read)].tolist()


def test_workers_and_crashes_do_not_change_the_result(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies in the third task ends the command with one line; running it again completes the data."""
    text, out = reference / "text", tmp_path / "out"
    options = ("--validation", "0.2", "--workers", "3")
    finish, parent = PairWriter.finish, os.getpid()

    def die(writer: PairWriter, folder: Path) -> Any:
        if writer.name == "train-00002" and os.getpid() != parent:
            while len(list(out.glob("unfinished/part-*.json"))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(writer, folder)

    with monkeypatch.context() as patched:
        patched.setattr(PairWriter, "finish", die)
        call(out, *options, text=text, status=2)
    assert not (out / "manifest.json").exists()
    with pytest.raises(ValueError, match="unfinished"):
        Manifest.read(out)
    records = [json.loads(path.read_text()) for path in sorted(out.glob("unfinished/part-*.json"))]
    damaged, *kept = [[out / f"{shard['name']}.bin" for shard in shards] for shards in records]
    times = {path: path.stat().st_mtime_ns for paths in kept for path in paths}
    assert times
    # Damaged files of completed tasks are prepared again, intact ones are kept.
    damaged[0].write_bytes(damaged[0].read_bytes()[:-1])
    call(out, *options, text=text)
    assert files(out) == files(reference / "out")
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_killed_command_can_be_continued(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL of the command its workers end too."""
    out = tmp_path / "out"
    options = ("--validation", "0.2", "--workers", "2")
    encode = BoundaryTokenizer.encode_documents

    def slowly(encoder: Any, texts: Any) -> Any:
        time.sleep(0.2)
        return encode(encoder, texts)

    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr(BoundaryTokenizer, "encode_documents", slowly)
            call(out, *options, text=reference / "text")
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while not list(out.glob("unfinished/part-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (out / "manifest.json").exists() and list(out.glob("unfinished/*"))
    call(out, *options, text=reference / "text")
    assert files(out) == files(reference / "out")


def test_verify_reads_everything_and_a_lost_file_is_prepared_again(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    call(out, "--validation", "0.2", "--verify", text=reference / "text")
    assert f"{out} is complete" in capsys.readouterr().out
    call(out, "--validation", "0.2", text=reference / "text")
    assert "is finished already" in capsys.readouterr().out
    path = out / "train-00001.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    call(out, "--verify", status=2)
    assert f"{path} is damaged: its SHA-256 is not the manifest's; delete train-00001.bin" in capsys.readouterr().err
    path.unlink()
    call(out, "--validation", "0.2", text=reference / "text")
    assert files(out) == files(reference / "out")


def test_data_that_are_held_out_by_number_are_not_continued(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier versions did: equal documents could then be in both splits. Finished data are left as they are."""
    out = Path(shutil.copytree(reference / "out", tmp_path / "out"))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest.pop("held_out_by") == "text"
    (out / "manifest.json").write_text(json.dumps(manifest))
    call(out, "--validation", "0.2", text=reference / "text")
    assert "is finished already" in capsys.readouterr().out
    (out / "train-00001.bin").unlink()
    call(out, "--validation", "0.2", text=reference / "text", status=2)
    assert "contains data of another held_out_by: None, not text; delete it" in capsys.readouterr().err


def test_all_text_identifies_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one document of a thousand with as many bytes. Manifests of earlier versions have further entries."""
    path, out, options = tmp_path / "a.jsonl", tmp_path / "out", ("--shard-tokens", "1000000", "--validation", "0")
    rows = [json.dumps({"text": f"document {i:04}"}) + "\n" for i in range(1000)]
    path.write_text("".join(rows))
    call(out, *options, text=path)
    path.write_text("".join(rows).replace("document 0002", "document 9999"))
    datasets._read_once.cache_clear()
    call(out, *options, text=path, status=2)
    assert "contains data of another source" in capsys.readouterr().err
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["source"]["train"]["digest"] = manifest["source"]["revision"] = None
    (out / "manifest.json").write_text(json.dumps(manifest))
    path.write_text("".join(rows))
    datasets._read_once.cache_clear()
    call(out, *options, text=path)
    assert f"{out} is finished already" in capsys.readouterr().out


def test_a_stream_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stream = DatasetConfig("", lambda _: Dataset.from_dict({"text": KEPT}).to_iterable_dataset(), str)
    monkeypatch.setitem(DATASETS, "made_up", stream)
    call(tmp_path / "out", "--dataset", "made_up", status=2)
    assert "--dataset made_up is a stream; download it, and give --dataset text_files" in capsys.readouterr().err


def test_a_separate_validation_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(texts: list[str | None]) -> DatasetConfig:
        return DatasetConfig("nowhere", lambda _: Dataset.from_dict({"text": texts}), lambda sample: sample["text"])

    monkeypatch.setitem(DATASETS, "made_up", named([*TEXTS]))
    monkeypatch.setitem(DATASETS, "made_up_validation", named(["validated", None, "twice"]))
    call(tmp_path / "a", "--dataset", "Made_Up", "--workers", "2")
    assert documents(tmp_path / "a", "train") == KEPT
    assert documents(tmp_path / "a", "validation") == ["validated", "twice"]
    *shards, last = [shard.name for shard in Manifest.read(tmp_path / "a").shards]
    assert shards == [f"train-0000{i}" for i in range(len(shards))] and last == "validation-00000"
    call(tmp_path / "b", "--dataset", "made_up", "--validation", "0.3")
    held = documents(tmp_path / "b", "validation")
    assert sorted(documents(tmp_path / "b", "train") + held) == sorted(KEPT) and held


def _of_another_kind(tmp_path: Path) -> list[str]:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    return []


def _damaged_manifest(tmp_path: Path) -> list[str]:
    call(tmp_path / "out", text=tmp_path / "text")
    (tmp_path / "out" / "manifest.json").write_text("[]")
    return []


def _damaged_tokenizer(tmp_path: Path) -> list[str]:
    (tmp_path / "tokenizer.json").write_text("{no")
    return ["--tokenizer", str(tmp_path)]


def _begun_otherwise(tmp_path: Path) -> list[str]:
    call(tmp_path / "out", "--border", "eos", text=tmp_path / "text")
    return []


def _broken(tmp_path: Path) -> list[str]:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no parquet")
    return ["--path", str(tmp_path / "broken.parquet")]


@pytest.mark.parametrize(
    "options, message",
    [
        (lambda t: ["--dataset", "pile"], "--dataset 'pile' is unknown; known are"),
        (lambda t: ["--dataset", "openwebtext", "--path", ""], "and give --path data/openwebtext"),
        (lambda t: ["--path", str(t / "no")], "no' does not exist"),
        (lambda t: ["--path", str(t / "no")], "prepare: --path: "),
        (_broken, "broken.parquet' cannot be read as parquet"),
        (lambda t: ["--tokenizer", str(t)], "has no tokenizer"),
        (lambda t: ["--tokenizer", str(t)], "prepare: --tokenizer: "),
        (lambda t: ["--shard-tokens", "0"], "--shard-tokens 0; it must be 1 or more"),
        (lambda t: ["--validation", "1"], "--validation 1.0; it must be 0 or more, and less than 1"),
        (lambda t: ["--workers", "0"], "--workers 0; it must be 1 or more"),
        (lambda t: ["--text-column", "body"], "; --text-column names the column"),
        (lambda t: ["--text-column", "body", "--dataset", "standard_library"], "the column of --dataset standard_lib"),
        (lambda t: ["--border", "none"], "argument --border: invalid choice: 'none'"),
        (_of_another_kind, "out is not empty, and contains no prepared data"),
        (_damaged_manifest, "out/manifest.json is damaged; delete "),
        (_damaged_tokenizer, "cannot be read: key must be a string"),
        (_begun_otherwise, "out contains data of another border: eos, not bos_eos; delete it"),
    ],
)
def test_user_errors_are_one_line(
    options: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = jsonl(tmp_path / "text")
    more = options(tmp_path)
    capsys.readouterr()
    call(tmp_path / "out", *more, text=text, status=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prepare: ") and message in line


def test_a_failed_worker_reports_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text, out = jsonl(tmp_path / "text"), tmp_path / "out"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(PairWriter, "add", full)
        call(out, text=text, status=2)
    *_, line = capsys.readouterr().err.splitlines()  # after bars of the datasets library
    assert line == f"prepare: {out} cannot be written: No space left on device; run the same command again to continue"
    with monkeypatch.context() as patched, prepare._exclusive_lock(out):
        patched.setattr(prepare, "_LOCK_SECONDS", 0.2)
        call(out, text=text, status=2)
        assert f"another process is preparing data in {out}" in capsys.readouterr().err
    call(out, text=text)
    assert not (out / "lock").exists() and not (out / "unfinished").exists()


def test_the_default_split_suits_the_default_validation(tmp_path: Path) -> None:
    """Of 4,000 documents, one in 2,000 would be two documents."""
    with open(tmp_path / "a.jsonl", "w") as text:
        text.writelines(json.dumps({"text": f"{i:04} " * 100}) + "\n" for i in range(4000))
    options = ["--path", f"{tmp_path}/a.jsonl", "--tokenizer", str(BYTE_TOKENIZER), "--output", f"{tmp_path}/data"]
    assert prepare.main(options) == 0
    held_out = Manifest.read(tmp_path / "data").total("validation", "tokens")
    assert held_out > 16 * 2 * 8 * 256  # steps, readers, batch and length of train_configs/embedded.toml


def test_the_default_share_has_limits() -> None:
    sizes = np.array([10_000, 10_000])
    assert prepare._default_share(sizes, 4.0) == 0.05 and prepare._default_share(sizes * 2000, 4.0) == 0.02
    assert prepare._default_share(sizes * 10**6, 4.0) == 0.0005
