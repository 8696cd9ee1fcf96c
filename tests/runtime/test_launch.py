"""./run_train.sh as started by a user."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import server
from tests.marks import slow
from torchtitan_scape import start

ROOT = Path(__file__).resolve().parents[2]
SHORT = [
    "--training.steps=3",
    "--training.local_batch_size=1",
    "--training.seq_len=32",
    "--validation.local_batch_size=1",
    "--validation.seq_len=32",
    "--validation.steps=1",
]
# A model on bytes, of which a step takes a tenth of the embedded model's time.
SMALL = [
    "--model.flavor=study",
    "--model.hf_assets_path=./torchtitan_scape/data/byte_tokenizer",
    "--sync.scape.block_size=64",
]


def with_defaults(environment: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "NGPU": "2", "LOG_RANK": "0,1", **environment}


def launch(environment: dict[str, str], *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the script with a Python that forks; `test_two_nodes_of_one_rank_communicate_over_the_network` starts real
    ones.
    """
    begin = time.monotonic()
    result = subprocess.run(
        [str(ROOT / "run_train.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=with_defaults({"PYTHON": server.python(), **environment}),
    )
    return result, time.monotonic() - begin


def test_the_script_ends_in_one_line_on_every_rank(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result, seconds = launch({"TMPDIR": str(temporary)}, f"--job.dump_folder={tmp_path}/out", "--optimizer.name=AdamW")
    output = result.stdout + result.stderr
    assert result.returncode not in (0, 124)
    # The launcher may stop the other rank before it prints the same line.
    assert "error: [optimizer] name = 'AdamW' with [sync] method = 'scape'" in output
    assert "Traceback" not in output
    assert seconds < 60
    assert not (tmp_path / "out").exists(), "nothing is written before the config is checked"
    assert list(temporary.iterdir()) == [], "torchrun would leave the output of all ranks there"


def test_missing_data_ends_in_one_line_from_a_rank_without_output(tmp_path: Path) -> None:
    """The launcher prints the first failed rank's message, whichever ranks LOG_RANK shows."""
    wrong = ["--training.dataset=text_files", "--training.dataset_path=/nowhere"]
    arguments = [f"--job.dump_folder={tmp_path}/out", *wrong]
    result, seconds = launch({"LOG_RANK": "1"}, *arguments)
    output = result.stdout + result.stderr
    assert result.returncode != 0 and seconds < 60
    assert "error: rank" in output and "/nowhere" in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists(), "nor is an empty folder left"


def test_an_unexpected_error_of_a_rank_without_output_has_its_traceback_and_host(tmp_path: Path) -> None:
    """The launcher deletes the output of this rank."""
    (tmp_path / "failing.py").write_text(
        "import os, time\n"
        "from torchtitan_scape.runtime.shutdown import Shutdown\n"
        "def work():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise KeyError('nothing')\n"
        "    time.sleep(60)\n"
        "Shutdown().run(work, (ValueError,))\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    result, _ = launch({"TRAIN_PROGRAM": "failing", "PYTHONPATH": path, "LOG_RANK": "0"})
    assert result.returncode == 3
    output = result.stdout + result.stderr
    assert f"[rank 0] error: rank 1 ({socket.gethostname()}) stopped: KeyError: 'nothing'" in output
    assert output.count("Traceback") == 1 and "raise KeyError('nothing')" in output
    assert "error: rank 1 ended with exit code 3: KeyError: 'nothing'" in output or "rank 0 ended with" in output


def test_an_error_of_one_rank_in_set_up_ends_all_without_a_restart(tmp_path: Path) -> None:
    """Only rank 0 writes to TensorBoard, after the process groups exist."""
    arguments = [f"--job.dump_folder={tmp_path}/out", "--metrics.save_tb_folder=/sys/out", "--checkpoint.enable"]
    result, _ = launch({"MAX_RESTARTS": "2"}, *SHORT, *arguments)
    output = result.stdout + result.stderr
    assert result.returncode == 2, output
    assert "/sys/out" in output and "Traceback" not in output and "restarting" not in output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_can_take_steps(tmp_path: Path) -> None:
    """No other rank selects entries, but masks are valid. Two recipes are combined, and the resolved options are
    written.
    """
    recipes = ["train_configs/embedded.toml", f"{tmp_path}/own.toml"]
    Path(recipes[1]).write_text('[sync.scape]\nselection = "tensor"\n')
    result, _ = launch(
        {"COMM_MODE": "fake_backend", "NGPU": "3", "CONFIG_FILE": ",".join(recipes)},
        *SHORT,
        *SMALL,
        f"--job.dump_folder={tmp_path}",
        "--training.steps=4",
        "--sync.scape.density_warmup_steps=0",
    )
    assert result.returncode == 0, result.stderr
    assert "Summary of 4 steps" in result.stdout + result.stderr
    assert f"Recipe: {', '.join(recipes)}; scape with AdamS; the command line sets " in result.stdout + result.stderr
    resolved = (tmp_path / "resolved.toml").read_text()
    assert f'selection = "tensor"  # {recipes[1]}\n' in resolved and "\nsteps = 4  # command line\n" in resolved
    assert "\nlr = 0.002  # train_configs/embedded.toml\n" in resolved


def test_a_start_that_takes_no_step_does_not_replace_the_recipe_of_the_run(tmp_path: Path) -> None:
    """The checkpoint is of another model; or the run has ended, so that its sequence length is only in this file."""
    run = [*SHORT, *SMALL, f"--job.dump_folder={tmp_path}", "--checkpoint.enable", "--validation.no-enable"]
    assert launch({"NGPU": "1"}, *run, "--training.steps=1")[0].returncode == 0
    written = (tmp_path / "resolved.toml").read_text()
    assert launch({"NGPU": "1"}, *run, "--training.steps=1", "--training.seq_len=64")[0].returncode == 0
    refused, _ = launch({"NGPU": "1"}, *run, "--training.steps=2")
    assert refused.returncode == 2 and "contains only the model" in refused.stderr
    assert (tmp_path / "resolved.toml").read_text() == written


def test_a_missing_recipe_and_a_missing_rendezvous_are_named() -> None:
    result, _ = launch({"CONFIG_FILE": "train_configs/none.toml"})
    assert result.returncode == 2 and "train_configs/none.toml does not exist" in result.stderr
    result, _ = launch({"CONFIG_FILE": "train_configs/embedded.toml,none.toml"})
    assert result.returncode == 2 and "none.toml does not exist" in result.stderr
    result, _ = launch({"NNODES": "2"})
    assert result.returncode == 2 and "RDZV_ENDPOINT" in result.stderr
    for name, value in (("NGPU", "auto"), ("NGPU", "0"), ("NNODES", "4:2"), ("NNODES", "-1")):
        result, _ = launch({name: value})
        text = f"error: {name}={value}; it must be a number, 1 or more"
        assert result.returncode == 2 and result.stderr.strip() in (text, f"{text}, or a range such as 2:4")


@pytest.mark.parametrize(
    "given, expected",
    [
        ("own.toml", "{here}/own.toml"),
        ("train_configs/embedded.toml", "train_configs/embedded.toml"),  # not in the folder of the call
        ("train_configs/study.toml,own.toml", "{here}/train_configs/study.toml,{here}/own.toml"),
        ("../call/my own.toml", "{here}/../call/my own.toml"),
        ("{here}/own.toml", "{here}/own.toml"),
        ("own.toml,", ""),
        ("own.toml,none.toml", ""),
    ],
)
def test_recipes_are_relative_to_the_folder_of_the_call(
    given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "call"
    (here / "train_configs").mkdir(parents=True)
    for name in ("own.toml", "my own.toml", "train_configs/study.toml"):
        (here / name).touch()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SCAPE_CALLED_FROM", str(here))
    if expected:
        assert start.recipe_files(given.format(here=here)) == expected.format(here=here)
    else:
        with pytest.raises(ValueError, match=r"does not exist; recipes are in train_configs/|contains an empty name"):
            start.recipe_files(given)


def test_the_script_starts_in_the_repository_and_names_the_folder_of_the_call(tmp_path: Path) -> None:
    python = tmp_path / "python"  # imports everything
    python.write_text('#!/bin/sh\ntest "$1" = -m || exec echo 0.2.2\necho "$PWD" "$SCAPE_CALLED_FROM" "$@"\n')
    python.chmod(0o755)
    command = [str(ROOT / "run_train.sh"), "--training.steps=1", "a b"]
    environment = {**os.environ, "PYTHON": str(python)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    expected = f"{ROOT} {tmp_path} -m torchtitan_scape.start --training.steps=1 a b"
    assert result.stdout.splitlines()[-1] == expected, result.stderr


@pytest.mark.slow
def test_two_nodes_of_one_rank_communicate_over_the_network(tmp_path: Path) -> None:
    """Two launches with one rendezvous, as on two hosts."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        endpoint = f"localhost:{s.getsockname()[1]}"
    environment = {"NNODES": "2", "NGPU": "1", "RDZV_ENDPOINT": endpoint, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "run_train.sh"), *SHORT, f"--job.dump_folder={tmp_path}"]
    nodes = [
        subprocess.Popen(
            command, env=with_defaults(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "2 ranks on 2 node(s) of 1" in summary["layout"]
    assert list(summary["bytes_sent_per_step_and_rank"]) == ["network"]


@pytest.mark.parametrize("recipe, parameters", [slow("llama_500m", "513,590,784"), ("llama_1_8b", "1,831,201,280")])
def test_dry_runs_build_the_papers_models_for_64_ranks(recipe: str, parameters: str, tmp_path: Path) -> None:
    """The model cards of H2O-Danube3-500M and H2O-Danube-1.8B state 514 M and 1.83 B."""
    result, _ = launch(
        {"CONFIG_FILE": f"train_configs/{recipe}.toml", "COMM_MODE": "fake_backend", "NGPU": "64"},
        f"--job.dump_folder={tmp_path}",
        "--topology.machine=frontier",
        "--parallelism.data_parallel_shard_degree=8",
        "--sync.scape.density=0.01",
        *(("--sync.scape.update=sharded", "--sync.scape.weights_dtype=bfloat16") if recipe == "llama_1_8b" else ()),
        "--sync.scape.offload=state",
    )
    assert result.returncode == 0, result.stderr
    output = result.stdout + result.stderr
    assert "in host memory" in output
    assert f"size: {parameters} total parameters" in output
    assert "replicate 8 x shard 8" in output and "Dry run: everything was built" in output


def test_a_dry_run_of_simulated_replicas(tmp_path: Path) -> None:
    """FP32 and one shard. In training the model would not be wrapped by FSDP2."""
    result, _ = launch(
        {"CONFIG_FILE": "train_configs/study.toml", "COMM_MODE": "fake_backend", "NGPU": "1"},
        f"--job.dump_folder={tmp_path}",
    )
    assert result.returncode == 0, result.stderr
    assert "Dry run: everything was built" in result.stdout + result.stderr


def test_help_shows_our_sections() -> None:
    result, _ = launch({}, "--help")
    assert result.returncode == 0
    for section in ("sync.scape", "topology", "training"):
        assert f"\n  {section} " in result.stdout
    result, _ = launch({"CONFIG_FILE": "none.toml"}, "--help", "sync.scape")
    assert result.returncode == 0 and "\n  --sync.scape.density: number, default 0.1\n" in result.stdout
    result, _ = launch({}, "--help", "sync.scope")
    assert result.returncode == 2 and "--help sync.scope: the section is unknown; known are sync, " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_no_thread_of_the_launcher_receives_its_signals() -> None:
    """Threads of OpenBLAS start while torch is imported, with more than one core. With them, SIGTERM ended the launcher
    without a save.
    """
    code = """
import pathlib, signal
from torchtitan_scape import start
try:
    start.main()
except SystemExit:
    lines = [line for task in pathlib.Path("/proc/self/task").iterdir() for line in open(task / "status")]
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
    print(len(masks) > 1, {mask >> signal.SIGTERM - 1 & 1 for mask in masks})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NGPU": "1", "OMP_NUM_THREADS": "2", "MAX_RESTARTS": "none"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == f"{len(os.sched_getaffinity(0)) > 1} {{1}}\n", result.stdout + result.stderr


def test_arguments_are_passed_to_the_trainer_only(tmp_path: Path) -> None:
    """On the first start, without a Python that has TorchTitan, arguments are not passed to the installation."""
    repository = tmp_path / "repository"
    (repository / "scripts").mkdir(parents=True)
    for name in ("run_train.sh", "scripts/environment.sh"):
        shutil.copy(ROOT / name, repository / name)
    # A Python that can import nothing, copies itself as .venv, and prints the package that it should install.
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"venv) mkdir -p .venv/bin && cp {python} .venv/bin/python ;;\n"
        'pip) echo "asked to install: $6" ;;\n'
        "esac\n"
        "exit $(test $1 = -m && echo 0 || echo 1)\n"
    )
    python.chmod(0o755)
    result = subprocess.run(
        [str(repository / "run_train.sh"), "--sync.scape.density=0.5"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": str(python), "CONFIG_FILE": "nowhere.toml"},
    )
    assert "asked to install: .[torch,trainer]\n" in result.stdout, result.stdout + result.stderr
