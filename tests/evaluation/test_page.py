"""The first three commands of docs/how_to/export_and_evaluate.md lead to a score."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import server
from tests.docs.pages import ROOT, blocks


@pytest.mark.slow
def test_three_commands_lead_to_a_score(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra eval, with the lm-evaluation-harness, is not installed")
    script = blocks("docs/how_to/export_and_evaluate.md", "bash")[0]
    assert len(script.splitlines()) == 3
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python").symlink_to(server.python())
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": server.python()}
    environment |= {"NGPU": "2", "OMP_NUM_THREADS": "1"}
    for command in script.splitlines():
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    scores = tmp_path / "outputs/embedded/export/evaluation/standard_library_validation.json"
    found = json.loads(scores.read_bytes())["results"]["standard_library_validation"]
    # An untrained model needs 8 bits per byte; 200 steps reduce this.
    assert 1.0 < found["bits_per_byte"]["value"] < 4.0
    print(done.stdout)
