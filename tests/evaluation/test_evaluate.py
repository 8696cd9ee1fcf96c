"""Scores of small models follow from their logits, on one process and on two; errors are one line."""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.evaluation.conftest import CHOICES, CLOZES, TEXTS, write_task
from tests.pool import Pool
from torchtitan_scape.core.command import install_command
from torchtitan_scape.evaluate import digest, main

BYTES = "torchtitan_scape/data/byte_tokenizer/tokenizer.json"
NO_HARNESS = "the extra eval, with the lm-evaluation-harness, is not installed"
THREE = "local_choice,local_cloze,local_rolling"


@pytest.fixture
def harness() -> None:
    pytest.importorskip("lm_eval", reason=NO_HARNESS)


def given(model: Path, tasks: str, local: Path, *more: str) -> list[str]:
    return ["run", "--model", str(model), "--tasks", tasks, "--include-path", str(local), *more]


def evaluate(arguments: list[str], output: Path) -> dict[str, Any]:
    """Return the document of an evaluation."""
    assert main([*arguments, "--output", str(output)]) == 0
    (path,) = output.glob("*.json")
    assert path.with_suffix(".md").is_file()
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


class Ours:
    """Log-likelihoods from the logits of this project's model, with one token per byte."""

    def __init__(self, model: torch.nn.Module, family: str) -> None:
        self.model = model
        self.bos, self.length = family == "llama", 64 if family == "llama" else 96
        self._encoder = Tokenizer.from_file(BYTES)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        assert len(ids) == len(text.encode())
        return ids

    def of(self, inputs: list[int], targets: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of the targets, which end one token after the inputs, and whether all were most
        likely.
        """
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([inputs[-self.length :]]))[0, -len(targets) :]
        wanted = torch.tensor(targets)
        found = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum()
        return float(found), bool((logits.argmax(-1) == wanted).all())

    def after(self, context: str, rest: str) -> tuple[float, bool]:
        whole = [0] * self.bos + self.tokens(context + rest)
        return self.of(whole[:-1], self.tokens(rest))

    def whole(self, text: str) -> float:
        """Return the log-likelihood in windows, each with as much preceding text as fits; the first starts with the
        border.
        """
        start = [0 if self.bos else 1]
        tokens = start + self.tokens(text)
        ends = [*range(self.length, len(tokens) - 1, self.length), len(tokens) - 1]
        begins = [0, *ends[:-1]]
        return sum(self.of(tokens[:e], tokens[b + 1 : e + 1])[0] for b, e in zip(begins, ends, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_those_of_our_logits(
    family: str, exported: dict[str, Path], local: Path, model_of: Any, tmp_path: Path, harness: None
) -> None:
    found = evaluate(given(exported[family], THREE, local), tmp_path)
    ours = Ours(model_of(family)[0], family)
    assert (
        found["longest"] == ours.length
        and found["bos"] is ours.bos
        and found["dtype"] == "float32"
        and found["processes"] == 1
    )
    assert found["digest"] == digest(exported[family]) and found["versions"]["lm_eval"] == "0.4.13"

    def score(task: str, metric: str) -> float:
        return float(found["results"][task][metric]["value"])

    right, right_by_length = 0, 0
    for row in CHOICES:
        values = [ours.after(f"Q: {row['q']}", f" {choice}")[0] for choice in row["choices"]]
        by_length = [value / len(choice) for value, choice in zip(values, row["choices"], strict=True)]
        right += values.index(max(values)) == row["gold"]
        right_by_length += by_length.index(max(by_length)) == row["gold"]
    assert score("local_choice", "acc") == pytest.approx(right / 3)
    assert score("local_choice", "acc_norm") == pytest.approx(right_by_length / 3)
    pairs = [text.rpartition(" ") for text in CLOZES]
    likely = [ours.after(context, f" {last}") for context, _, last in pairs]
    mean = sum(value for value, _ in likely) / 3
    assert math.log(score("local_cloze", "perplexity")) == pytest.approx(-mean, rel=1e-5)
    assert score("local_cloze", "acc") == sum(first for _, first in likely) / 3
    bits = -sum(map(ours.whole, TEXTS)) / sum(len(text.encode()) for text in TEXTS) / math.log(2)
    assert score("local_rolling", "bits_per_byte") == pytest.approx(bits, rel=1e-5)
    assert set(found["task_hashes"]) == set(THREE.split(",")) and found["task_versions"]["local_choice"] == 2.0


def test_scores_do_not_depend_on_the_batch_size(
    exported: dict[str, Path], model_of: Any, tmp_path: Path, harness: None
) -> None:
    """The last window of a periodic text repeats an earlier one, with fewer tokens to predict. Likewise, one text is
    split into context and continuation at different places.
    """
    ours = Ours(model_of("llama")[0], "llama")
    texts = ["ab" * 100, "x" * 200, "another text"]
    write_task(
        tmp_path,
        "periodic",
        "loglikelihood_rolling",
        [{"text": text} for text in texts],
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]",
    )
    splits = [("ab ab", " ab ab ab"), ("ab ab ab", " ab ab"), ("ab ab ab ab", " ab")]
    write_task(
        tmp_path,
        "splits",
        "loglikelihood",
        [{"a": before, "b": after} for before, after in splits],
        "doc_to_text: '{{a}}'\ndoc_to_target: '{{b}}'\ntarget_delimiter: ''\n"
        "metric_list: [{metric: perplexity, aggregation: perplexity}]",
    )
    bits = -sum(map(ours.whole, texts)) / sum(map(len, texts)) / math.log(2)
    mean = sum(ours.after(*split)[0] for split in splits) / len(splits)
    for size in (1, 2, 8):
        more = ("--batch-size", str(size))
        found = evaluate(given(exported["llama"], "periodic,splits", tmp_path, *more), tmp_path / f"scores{size}")
        assert found["results"]["periodic"]["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
        assert math.log(found["results"]["splits"]["perplexity"]["value"]) == pytest.approx(-mean, rel=1e-5)


def test_overflow_is_infinite_and_other_results_are_kept(
    exported: dict[str, Path], tmp_path: Path, harness: None
) -> None:
    """A perplexity beyond FP64, one whose standard error overflows, and texts without a byte."""
    from lm_eval.api.metrics import perplexity

    from torchtitan_scape.evaluation.harness import _safe_stderr

    rolling = "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}, "
    rolling += "{metric: byte_perplexity}, {metric: bits_per_byte}]"
    write_task(tmp_path, "one_word", "loglikelihood_rolling", [{"text": "q" * 2000}, {"text": "z" * 900}], rolling)
    write_task(tmp_path, "empty", "loglikelihood_rolling", [{"text": ""}], rolling)
    found = evaluate(given(exported["llama"], "one_word,empty", tmp_path), tmp_path / "scores")
    results = found["results"]
    assert results["one_word"]["word_perplexity"] == {"value": math.inf, "stderr": None}
    assert 0 < results["one_word"]["bits_per_byte"]["value"] < 100
    assert results["empty"]["bits_per_byte"]["value"] is None
    (path,) = (tmp_path / "scores").glob("*.json")
    assert "Infinity" not in path.read_text() and "NaN" not in path.read_text()
    assert "| one_word | word_perplexity | inf | - | 2 |" in path.with_suffix(".md").read_text()
    estimate = _safe_stderr(perplexity, 10)
    assert estimate is not None and math.isnan(estimate([-500.0, -400.0])) and math.isnan(estimate([-800.0, 0.0]))


def test_an_answer_longer_than_a_sequence_is_one_line(
    exported: dict[str, Path], tmp_path: Path, capsys: Any, harness: None
) -> None:
    options = "doc_to_text: 'a'\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: acc}]"
    write_task(tmp_path, "answers", "loglikelihood", [{"text": "b" * 80}], options)
    assert main(given(exported["llama"], "answers", tmp_path)) == 2
    err: str = capsys.readouterr().err
    assert err.endswith("has 80 tokens; a sequence of this model has 64\n"), err  # After progress bars.


def test_likelihoods_of_a_bf16_model_are_fp32(
    exported: dict[str, Path], local: Path, tmp_path: Path, harness: None
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "bf16"
    folder.mkdir()
    for path in exported["llama"].glob("*.json"):
        (folder / path.name).write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    values = {name: value.bfloat16() for name, value in load_file(exported["llama"] / "model.safetensors").items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    found = evaluate(given(folder, "local_cloze", local), tmp_path / "scores")
    assert found["dtype"] == "bfloat16"
    total = len(CLOZES) * math.log(found["results"]["local_cloze"]["perplexity"]["value"])
    assert total > 4 * len(CLOZES)  # Above 4, BF16 numbers and their sums are multiples of 1/32.
    assert abs(32 * total - round(32 * total)) > 1e-3


def test_a_limited_group_is_marked(exported: dict[str, Path], local: Path, tmp_path: Path, harness: None) -> None:
    found = evaluate(given(exported["gpt2"], "local,standard_library_validation", local, "--limit=2"), tmp_path)
    assert found["shown"] == ["local_choice", "local_rolling", "standard_library_validation"]
    assert found["limit"] == 2 and set(found["documents"].values()) == {2}
    error_line = (tmp_path / "local+standard_library_validation-limit2.md").read_text()
    assert "only the first 2 documents of each task" in error_line and "| local_choice | acc_norm |" in error_line


def rank(arguments: list[str]) -> int:
    return main(arguments)


@pytest.mark.slow
def test_two_processes_share_the_documents(
    exported: dict[str, Path], local: Path, pool2: Pool, tmp_path: Path, harness: None
) -> None:
    """On CPUs with gloo; the same documents in the same order give the same hashes."""
    alone = evaluate(given(exported["llama"], THREE, local), tmp_path / "one")
    shared = tmp_path / "two"
    assert pool2(rank, [*given(exported["llama"], THREE, local), "--output", str(shared)]) == [0, 0]
    (path,) = shared.glob("*.json")
    found = json.loads(path.read_bytes())
    assert found["processes"] == 2 and found["task_hashes"] == alone["task_hashes"]
    assert found["documents"] == alone["documents"]
    for task, metrics in alone["results"].items():
        for metric, both in metrics.items():
            assert found["results"][task][metric]["value"] == pytest.approx(both["value"], rel=1e-4), (task, metric)


def error_line(arguments: list[str], capsys: Any) -> str:
    """Return the single line on stderr of a refused command."""
    capsys.readouterr()
    assert main(arguments) == 2
    err: str = capsys.readouterr().err
    assert err.startswith("evaluate: ") and err.count("\n") == 1, err
    return err


def test_a_folder_without_an_export_is_one_line(exported: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text('{"model_type": "llama"}')
    for folder in ("half", "nowhere"):
        message = error_line(["run", "--model", str(tmp_path / folder), "--tasks", "piqa"], capsys)
        assert folder in message and "python -m torchtitan_scape.export" in message
    own = ["run", "--model", str(exported["llama"])]
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "piqa.json").write_text('{"model": "another"}')
    for more, word in (
        ([], "--tasks"),
        (["--tasks", ","], "names none"),
        (["--tasks", "piqa", "--limit", "0"], "--limit 0"),
        (["--tasks", "piqa", "--include-path", str(tmp_path / "nowhere")], "is no folder"),
        (["--tasks", "piqa", "--output", str(tmp_path / "half" / "config.json" / "x")], "cannot be written"),
        (["--tasks", "piqa", "--output", str(tmp_path / "scores")], "piqa.json has the scores of another"),
    ):
        if not {"--limit", "--output"} & {*more} or importlib.util.find_spec("lm_eval"):
            assert word in error_line([*own, *more], capsys)
    assert not (exported["llama"] / "evaluation").exists()


def test_the_error_of_one_process_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A text may be too long on one process alone, and the launcher does not know why that process ended."""

    def refuse(options: Any) -> None:
        raise ValueError("too long")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torchtitan_scape.evaluate.run", refuse)
    for connected in (False, True):
        monkeypatch.setattr("torch.distributed.is_initialized", lambda connected=connected: connected)
        assert main(["run", "--model=m", "--tasks=t"]) == 2
        assert capsys.readouterr().err == ("evaluate: too long\n" if connected else "")


def test_without_the_extra_the_error_names_the_command(exported: dict[str, Path], capsys: Any) -> None:
    find = importlib.util.find_spec
    with patch("torchtitan_scape.evaluate.find_spec", lambda name: None if name == "lm_eval" else find(name)):
        for command in (["run", "--model", str(exported["llama"])], ["fetch"]):
            assert install_command("eval") in error_line([*command, "--tasks", "piqa"], capsys)


def test_unknown_tasks_and_missing_data_are_one_line(
    exported: dict[str, Path], local: Path, registry: Any, capsys: Any
) -> None:
    from torchtitan_scape.evaluation import harness

    small = harness.TaskManager
    with patch.object(harness, "TaskManager", lambda **given: small(**given) if len(given) > 1 else registry):
        assert "similar names are piqa" in error_line(given(exported["llama"], "piqqa", local), capsys)
    message = error_line(given(exported["llama"], "local_choice,local", local), capsys)
    assert "'local_choice' is in local_choice and in local; omit one" in message
    message = error_line(given(exported["llama"], "far_away", local), capsys)
    assert (
        "nobody/nothing has not been fetched" in message
        and f"fetch --tasks far_away --include-path {local}," in message
    )
    with patch("torchtitan_scape.data.datasets.unreachable", lambda: "no network"):
        message = error_line(["fetch", "--tasks", "far_away", "--include-path", str(local)], capsys)
    assert "nobody/nothing: the hub cannot be reached (no network)" in message
    assert main(["fetch", "--tasks", "local", "--include-path", str(local)]) == 0
    assert "local_choice: 3 documents" in capsys.readouterr().out
    with patch.dict(os.environ, LOCAL_RANK="1"):  # Printed once per host.
        assert main(given(exported["llama"], "far_away", local)) == 2
    assert capsys.readouterr().err == "" and not (exported["llama"] / "evaluation").exists()


def test_missing_weights_are_refused(
    exported: dict[str, Path], local: Path, tmp_path: Path, capsys: Any, harness: None
) -> None:
    from safetensors.torch import load_file, save_file

    for path in exported["llama"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "missing keys" in error_line(given(tmp_path, "local_cloze", local), capsys)
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "mismatched keys" in error_line(given(tmp_path, "local_cloze", local), capsys)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert f"the weights in {tmp_path} cannot be read" in error_line(given(tmp_path, "local_cloze", local), capsys)


def test_generating_more_than_a_sequence_is_refused(
    exported: dict[str, Path], local: Path, tmp_path: Path, capsys: Any, harness: None
) -> None:
    text = (local / "local_cloze.yaml").read_text().partition("metric_list")[0]
    text = text.replace("local_cloze\n", "long\n").replace("type: loglikelihood", "type: generate_until")
    (tmp_path / "long.yaml").write_text(f"{text}metric_list: [{{metric: exact_match}}]\n")
    message = error_line(given(exported["gpt2"], "long", tmp_path), capsys)
    assert "long generates 256 tokens; a sequence of this model has 96" in message
