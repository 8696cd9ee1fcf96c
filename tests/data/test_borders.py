"""Tokens between documents, for tokenizers that define BOS and EOS in different ways."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.data.conftest import tokenizer_in
from torchtitan_scape.config.job_config import Data, JobConfig
from torchtitan_scape.data import datasets as ours
from torchtitan_scape.data.encoding import BoundaryTokenizer, border_ids
from torchtitan_scape.data.loader import TextDataLoader, tokenizer_digest
from torchtitan_scape.titan.tokenizer import END_OF_TEXT, build_tokenizer
from torchtitan_scape.trainer.trainer import ScapeTrainer


def made(folder: Path, special: list[str], template: str = "", **config: Any) -> Any:
    """Return a byte tokenizer stored in a folder, as TorchTitan loads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((), trainer)
    if template:
        used = [(token, tokenizer.token_to_id(token)) for token in special]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_in(folder)


@pytest.mark.parametrize("named", [{"bos_token": END_OF_TEXT, "eos_token": {"content": END_OF_TEXT}}, {}])
def test_a_shared_bos_and_eos_token_is_written_once(named: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2: TorchTitan's class found a BOS and no EOS. The published folder defines neither."""
    tokenizer = made(tmp_path, [END_OF_TEXT], **named)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 0)
    for border in ("bos_eos", "eos"):
        assert border_ids(tokenizer, border) == ([], [0])
        ids = BoundaryTokenizer(tokenizer, border).encode("ab")
        assert ids[-1] == 0 and ids.count(0) == 1 and tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize("template", ["", "<s> $A", "<s> $A </s>"])
def test_the_option_overrides_the_template(template: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, ["<s>", "</s>"], template, bos_token="<s>", eos_token="</s>")
    text = tokenizer.tokenizer.encode("ab", add_special_tokens=False).ids
    assert BoundaryTokenizer(tokenizer, "bos_eos").encode("ab") == [0, *text, 1]
    assert BoundaryTokenizer(tokenizer, "eos").encode("ab") == [*text, 1]


def test_documents_are_neither_truncated_nor_padded(tmp_path: Path) -> None:
    """The settings of tokenizer.json are ignored; padding would make documents as long as the longest of a batch."""
    made(tmp_path, ["</s>"], eos_token="</s>")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode = tokenizer_in(tmp_path).tokenizer.encode_batch_fast
    assert [len(found.ids) for found in encode(["ab", "abcdef"], add_special_tokens=False)] == [2, 6]


def test_a_tokenizer_without_eos_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = made(tmp_path, ["<s>"], bos_token="<s>")
    assert border_ids(tokenizer, "bos_eos") == ([0], []) and border_ids(tokenizer, "eos") == ([], [])
    assert "defines no EOS" in caplog.text


def test_the_loader_writes_the_configured_border(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n{"text": "ef"}\n')
    config = JobConfig(data=Data(border="eos"))
    config.training.dataset, config.training.dataset_path = "text_files", str(tmp_path / "a.jsonl")
    config.training.seq_len, config.training.local_batch_size = 4, 1
    (inputs, labels) = next(iter(ours.build_dataloader(1, 0, tokenizer, config)))
    got = [*inputs["input"][0].tolist(), labels[0, -1].item()]
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert got.count(eos) == 1 and bos not in got and tokenizer.decode(got) == "abcd"
    (inputs, _) = next(
        TextDataLoader("text_files", str(tmp_path / "a.jsonl"), BoundaryTokenizer(tokenizer, "bos_eos"), 4).sequences()
    )
    assert inputs["input"].tolist()[0] == bos
    with pytest.raises(ValueError, match="border"):
        Data(border="bos")  # type: ignore[arg-type]


SPELLED = "before <|end_of_text|> after"


def test_text_that_spells_a_special_token_is_text(tokenizer: Any) -> None:
    ids = BoundaryTokenizer(tokenizer, "eos").encode(SPELLED)
    assert ids.count(tokenizer.eos_id) == 1 and len(ids) == len(SPELLED) + 1
    assert tokenizer.decode(ids) == SPELLED


def test_a_tokenizer_without_a_token_for_unknown_text_is_accepted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>", "<new>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert BoundaryTokenizer(tokenizer_in(tmp_path), "eos").encode("a a") == [0, 0, 1]


def test_an_end_of_text_that_is_not_marked_special_is_text(tmp_path: Path) -> None:
    made(tmp_path, [])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([END_OF_TEXT])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    built = tokenizer_in(tmp_path)
    encoder = BoundaryTokenizer(built, "eos")
    assert built.eos_id == 256 and encoder.encode(f"a{END_OF_TEXT}").count(256) == 1
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    digests = TextDataLoader("text_files", str(tmp_path / "a.jsonl"), encoder, 4).digests
    assert digests["tokenizer"] == tokenizer_digest(tokenizer.to_str())  # That of checkpoints of earlier versions.


def test_the_largest_token_is_compared_with_the_embedding(tmp_path: Path) -> None:
    """It exceeds the number of entries if their numbers have gaps."""
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 10}')
    (tmp_path / "merges.txt").write_text("")
    job = JobConfig()
    job.model.hf_assets_path = str(tmp_path)
    run: Any = SimpleNamespace(
        tokenizer=build_tokenizer(job), job_config=job, model_args=SimpleNamespace(vocab_size=11)
    )
    ScapeTrainer._check_vocabulary(run)
    run.model_args.vocab_size = 10
    with pytest.raises(
        ValueError, match=r"the largest token of the tokenizer in .* is 10, but the embedding .* 10 rows"
    ):
        ScapeTrainer._check_vocabulary(run)
