"""The documentation site: it builds without warnings, and a broken link fails the build."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--config-file={folder / 'mkdocs.yml'}"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, f"--site-dir={site}"], capture_output=True, text=True, env=environment, timeout=120
    )
    return done


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "methods" / "scape.html").read_text()
    assert "SCAPE" in page and (tmp_path / "site" / "search" / "search_index.json").exists()
    assert "https://fonts" not in page


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    for name in ("mkdocs.yml", "scripts/docs_site.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    with open(tmp_path / "docs" / "index.md", "a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "nowhere.md" in done.stderr
