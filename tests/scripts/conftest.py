"""The fixture of tests of the quality study."""

import json
from pathlib import Path

import pytest

from scripts.studies import quality_study
from tests.scripts.made_up_study import Study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    def curves(folder: Path, **tags: str) -> dict[str, list[tuple[int, float]]]:
        return {k: [(s, v) for s, v in c] for k, c in json.loads((folder / "curves.json").read_text()).items()}

    monkeypatch.setattr(quality_study, "losses", curves)
    monkeypatch.setattr(quality_study, "POLL", 0.01)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return Study(tmp_path)
