"""The fixture of tests of studies."""

import json
from pathlib import Path

import pytest

from scripts.study import launchers, queue
from tests.scripts.study_stand_in import Study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    def curves(folder: Path, **tags: str) -> dict[str, list[tuple[int, float]]]:
        return {k: [(s, v) for s, v in c] for k, c in json.loads((folder / "curves.json").read_text()).items()}

    found = Study(tmp_path)
    monkeypatch.setattr(launchers, "losses", curves)
    monkeypatch.setattr(queue, "POLL", 0.01)
    monkeypatch.setattr(queue, "process_command", found.command)
    monkeypatch.setenv("CALLS", str(found.calls))
    return found
