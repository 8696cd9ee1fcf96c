"""Models that the planner is asked about: by a recipe, and by numbers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_scape.core.workloads import Recomputation, get_workload
from torchtitan_scape.models.registry import planned_recipe
from torchtitan_scape.planner import plan
from torchtitan_scape.planner.candidates import DENSE, best, make_request
from torchtitan_scape.planner.plan import main, workload_of_numbers
from torchtitan_scape.planner.step import Assumptions

ROOT = Path(__file__).parents[2]
FRONTIER = ["--machine", "frontier", "--nodes", "48"]


def test_the_answer_for_a_7b_model_given_by_numbers(capsys: pytest.CaptureFixture) -> None:
    assert main([*FRONTIER, "--parameters", "7e9", "--layers", "32", "--width", "4096"]) == 0
    said = capsys.readouterr().out
    for part in (
        "Llama of 32 layers, width 4096, feed-forward 11680, 32 heads, 7.00 G parameters",
        "Compress: yes. quantized_update ",
        "replicate 48 x shard 8",
        "data_parallel_shard_degree = 8",
    ):
        assert part in said


@pytest.mark.parametrize(
    "numbers, sizes, parameters",
    [
        ({"layers": 32, "width": 4096}, (32, 4096, 11008), 6_738_415_616),  # Llama 2 7B
        ({"parameters": 6.738415616e9, "layers": 32, "width": 4096}, (32, 4096, 11008), 6_738_415_616),
        # Llama 3 8B: its heads of keys and values, vocabulary and feed-forward
        (
            {"parameters": 8_030_261_248, "layers": 32, "width": 4096, "kv_heads": 8, "vocab": 128256},
            (32, 4096, 14336),
            8_030_261_248,
        ),
    ],
)
def test_numbers_of_published_models_give_their_sizes(
    numbers: dict[str, float], sizes: tuple[int, ...], parameters: int
) -> None:
    found = workload_of_numbers(**numbers)  # type: ignore[arg-type]
    assert (found.layers, found.width, found.ffn) == sizes and found.parameters == parameters


@given(st.floats(2e7, 5e12), st.sampled_from([0, 8, 24, 100]), st.sampled_from([260, 4096]))
def test_any_number_of_parameters_is_met(parameters: float, layers: int, vocab: int) -> None:
    try:
        found = workload_of_numbers(parameters, layers=layers, vocab=vocab)
    except ValueError as error:
        # Few layers of a wide model, or many of a narrow one: no width of a multiple of 128 fits.
        assert layers and re.search("these make .* to .* parameters", str(error))
        return
    assert found.parameters == pytest.approx(parameters, rel=0.02)
    assert found.width % found.heads == 0 and found.layers == (layers or found.layers)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layers", "32"], "the size of the model is missing; give --parameters 7e9, or --layers 32 --width 4096"),
        (["--heads", "32"], "the size of the model is missing"),
        (["--parameters", "nan"], "--parameters nan; it must be positive"),
        (["--parameters=-7e9"], "--parameters -7e.09; it must be positive"),
        (["--parameters", "seven"], "invalid float value: 'seven'"),
        (["--parameters", "7e9", "--layers", "-1"], "--layers -1; it must be positive"),
        (["--parameters", "7e9", "--layers", "2.5"], "invalid int value: '2.5'"),
        (["--parameters", "7e9", "--layers", "4", "--width", "64"], "these make .* to .* parameters: take such a"),
        (["--parameters", "1e6"], "a vocabulary of 32000; these make"),
        (["--parameters", "7e9", "--width", "4096", "--heads", "7"], "--heads 7 is no divisor of --width 4096; take 1"),
        (
            ["--layers", "2", "--width", "64", "--heads", "4", "--kv-heads", "3"],
            "--kv-heads 3 is no divisor of --heads",
        ),
        (["--parameters", "7e9", "--model", "llama_1_8b"], "--model llama_1_8b and numbers of another model"),
        (["--model", "nowhere.toml"], "the recipe nowhere.toml cannot be read: No such file"),
        (["--model", "{root}/train_configs/methods/adamw.toml"], "adamw.toml has no .model. flavor; add a model"),
        (["--model", "{tmp}/wrong.toml"], r"wrong.toml: \[model.sizes\] width is unknown"),
        (["--model", "{root}/train_configs/models/gpt_345m.toml", "--seq-len", "4096"], "learned positions for 1024"),
    ],
)
def test_a_wrong_model_is_one_line_and_exit_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "wrong.toml").write_text("[model.sizes]\nwidth = 3\n")
    assert main([one.format(root=ROOT, tmp=tmp_path) for one in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and re.search(message, said.err)


@pytest.mark.parametrize("name", ["llama_500m", "llama_1_8b", "gpt_345m"])
def test_recipes_of_the_papers_equal_the_named_models(name: str) -> None:
    found, named = planned_recipe([f"--job.config_file={ROOT}/train_configs/{name}.toml"], 32)[0], get_workload(name)
    assert found.names() == named.names() and found.shapes() == named.shapes()
    assert (found.sequence, found.batch) == (named.sequence, named.batch)


def test_a_recipe_with_pipeline_stages_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = tmp_path / "stages.toml"
    base = ROOT / "train_configs/llama_1_8b.toml"
    recipe.write_text(f'extends = "{base}"\n[parallelism]\npipeline_parallel_degree = 4\n')
    assert main([*FRONTIER, "--model", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "pipeline_parallel_degree = 4: the planner has no cost of a pipeline; set it to 1" in error
    assert error.count("\n") == 1


def test_a_recipe_of_the_users_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Sizes of its own, no global batch, and composed of two files."""
    sizes = "dim = 512\nn_layers = 8\nn_heads = 8\nvocab_size = 32000\n"
    (tmp_path / "model.toml").write_text(f'[model]\nflavor = "custom"\n[model.sizes]\n{sizes}')
    (tmp_path / "mine.toml").write_text("[training]\nlocal_batch_size = 4\nseq_len = 1024\n")
    given = f"{tmp_path}/model.toml,{tmp_path}/mine.toml"
    assert main(["--machine", "vista", "--nodes", "8", "--model", given]) == 0
    said = capsys.readouterr()
    assert "llama3 custom (dim 512, n_layers 8, n_heads 8, vocab_size 32000), 60 M parameters" in said.out
    assert "32 sequences of 1024 tokens a step" in said.out and said.err == ""


def test_a_recipe_is_planned_as_it_is(capsys: pytest.CaptureFixture) -> None:
    """With full activation checkpointing, which fits, and three levels; before, the planner refused it."""
    assert main([*FRONTIER[:3], "2", "--model", str(ROOT / "train_configs/neox_20b_frontier.toml")]) == 0
    said = capsys.readouterr().out
    assert "every layer recomputed, compiled" in said
    assert re.search(r"The recipe as it is: adamw, 2 replica\(s\) of 8 rank\(s\), three levels over 2, 8 and 16", said)
    assert re.search(r"Checkpoint: 246\.\d+ GB of all ranks.* for the 4 that are kept", said)


def test_a_recipe_is_planned_as_it_would_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The budget of bytes chooses density and code: the planner took the default ones, of eight times as many bytes."""
    recipe = tmp_path / "budget.toml"
    base = ROOT / "train_configs/models/llama_1_8b.toml"
    vista = ["--machine", "vista", "--nodes", "16", "--model", str(recipe)]
    for optimizer, expected in (
        ("AdamS", "The recipe as it is: scape 0.0527344 int4, 16 replica"),
        ("AdamW", "The recipe as it is has no prediction here: .optimizer. name = 'AdamW' with .sync. method"),
    ):
        sections = f'[optimizer]\nname = "{optimizer}"\n[sync]\nmethod = "scape"\n[sync.scape]\nbytes = 0.012\n'
        recipe.write_text(f'extends = "{base}"\n{sections}')
        assert main(vista) == 0 and re.search(expected, capsys.readouterr().out)


def test_advice_is_not_what_the_recipe_has() -> None:
    full, selective = (
        replace(get_workload("llama_1_8b"), recomputation=Recomputation(m)) for m in ("full", "selective")
    )
    little = Assumptions(usable_memory=0.01)
    for workload, advised in ((full, False), (selective, True)):
        with pytest.raises(ValueError, match="a rank at least") as refused:
            best(make_request("frontier", 2, workload, assumptions=little), DENSE)
        assert ("full activation checkpointing" in str(refused.value)) is advised


def test_a_recipe_that_fits_is_reported_if_no_candidate_fits(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("nothing fits")

    monkeypatch.setattr(plan, "advise", refuse)
    assert main([*FRONTIER[:3], "2", "--model", str(ROOT / "train_configs/llama_500m.toml")]) == 0
    said = capsys.readouterr().out
    assert "The recipe as it is: " in said and said.rstrip().endswith("No method and layout fits: nothing fits")
