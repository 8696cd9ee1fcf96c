"""README and docs/: quoted paths, keys and names exist, and all pages are linked."""

import json
import re
import tomllib
from dataclasses import fields, is_dataclass
from decimal import Decimal
from functools import cache
from statistics import mean, stdev
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, headings, links, numbers, quoted, read, tables, value_of
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import check_table
from torchtitan_scape.core.options import check_value

ROOMS = ("torchtitan_scape", "kernels", "topology", "scripts", "tests", "train_configs", "results", "docs")
# Columns of gaps -> row of the baseline. They are computed from the column "losses" of the table, if it has one.
GAPS = {f"to dense {optimizer}, %": f"{optimizer}, dense" for optimizer in ("Muon", "AdamW", "AdamS")}
# First cell of a table -> other studies that it quotes, and numbers that no report contains, with the reason.
OTHER_NUMBERS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    # Gaps to dense Muon, computed from the losses of both reports.
    "method, optimizer": ((), {"7.6", "22.1", "12.4", "23.7", "0.3", "2.1", "8.5", "27.3", "13.0", "32.1"}),
    "density": ((), {"7"}),  # number of seeds; the report lists their losses
}
# The generated page quotes TorchTitan's descriptions.
OWN_WORDS = [page for page in PAGES if page != "docs/reference/configuration.md"]
SOURCES = {".py", ".sh", ".sbatch", ".toml"}
# Programs, variables and keys that are not defined here.
FOREIGN = {"PATH", "WORLD_SIZE", "PIP_CONSTRAINT", "text", "offload", "qlimits"}


def key_type(path: str) -> Any:
    """Return the declared type of a key such as "sync.scape.density", or raise KeyError."""
    section: Any = JobConfig
    for name in path.split("."):
        if not is_dataclass(section):
            raise KeyError(path)
        section = {f.name: f.type for f in fields(section)}[name]
    return section


@cache
def keys() -> dict[str, list[Any]]:
    """Return the types of every key name over all sections."""
    found: dict[str, list[Any]] = {}

    def walk(section: Any) -> None:
        for f in fields(section):
            if is_dataclass(f.type):
                walk(f.type)
            else:
                found.setdefault(f.name, []).append(f.type)

    walk(JobConfig)
    return found


@cache
def words() -> set[str]:
    """Return every word of the sources."""
    files = [path for room in ROOMS[:6] for path in (ROOT / room).rglob("*") if path.suffix in SOURCES]
    text = "\n".join(path.read_text() for path in [*files, *ROOT.glob("*.sh"), ROOT / "pyproject.toml"])
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_with_its_title(page: str) -> None:
    assert read(page).startswith("# ")


@pytest.mark.parametrize("page", PAGES)
def test_links_have_existing_targets(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in headings(str(target.resolve().relative_to(ROOT))), link


@pytest.mark.parametrize("page", PAGES)
def test_quoted_paths_exist(page: str) -> None:
    for text in quoted(page):
        for word in text.split():
            word = word.rstrip(",:;")
            if word.split("/")[0] in ROOMS and "/" in word and "NAME" not in word:
                assert list(ROOT.glob(word.rstrip("/"))), word
            if word.endswith(".toml") and "/" not in word and "*" not in word:
                assert (ROOT / "train_configs" / word).exists() or (ROOT / word).exists(), word


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_a_study_are_those_of_its_report(page: str) -> None:
    """Every number of a table that follows the name of a report is, rounded to its digits, a number of the report."""
    for before, lines in tables(page):
        studies = set(re.findall(r"results/(\w+)/report\.md", before))
        others, exceptions = OTHER_NUMBERS.get(lines[0].strip("| ").split(" | ")[0], ((), set()))
        if studies:
            known = [number for study in studies.union(others) for number in report_numbers(study)]
            for text in (text for line in without_gaps(lines)[2:] for text in numbers(line) if text not in exceptions):
                half = Decimal(5).scaleb(Decimal(text).as_tuple().exponent - 1)  # type: ignore[operator]
                assert any(abs(one - Decimal(text)) <= half for one in known), (
                    f"{text} of {lines[0]} is not in {studies}"
                )


@pytest.mark.parametrize("page", PAGES)
def test_gaps_to_dense_training_follow_from_the_losses(page: str) -> None:
    """Gaps are those of the row's losses, paired by seed, whether or not the report has them."""
    for _, lines in tables(page):
        rows = [cells(line) for line in lines]
        if "losses" not in rows[0]:
            continue
        of = rows[0].index("losses")
        losses = {row[0]: [float(text) for text in numbers(row[of])] for row in rows[2:]}
        for column in GAPS.keys() & set(rows[0]):
            for row in rows[2:]:
                shown = [float(text) for text in numbers(row[rows[0].index(column)])]
                if row[0] == GAPS[column]:
                    assert shown == [0.0], row
                    continue
                pairs = zip(losses[row[0]], losses[GAPS[column]], strict=False)
                gaps = [100 * (loss / base - 1) for loss, base in pairs]
                expected = [mean(gaps), *([stdev(gaps)] if len(gaps) > 1 else [])]
                assert shown == pytest.approx(expected, abs=0.061), (column, row)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def without_gaps(lines: list[str]) -> list[str]:
    """Return the lines of a table without the columns that are computed from its losses."""
    rows = [cells(line) for line in lines]
    skipped = {i for i, name in enumerate(rows[0]) if name in GAPS and "losses" in rows[0]}
    return [" | ".join(cell for i, cell in enumerate(row) if i not in skipped) for row in rows]


@cache
def report_numbers(study: str) -> list[Decimal]:
    return [Decimal(text) for text in numbers((ROOT / "results" / study / "report.md").read_text())]


@pytest.mark.parametrize("page", OWN_WORDS)
def test_quoted_keys_exist_and_their_values_are_valid(page: str) -> None:
    sections = {f.name for f in fields(JobConfig)}
    for text in quoted(page):
        for section, key, value in re.findall(r"^\[([a-z_.]+)\](?: ([a-z_0-9]+)(?: = (.+))?)?$", text):
            found = key_type(f"{section}.{key}" if key else section)
            if value:
                check_value(section, key, value_of(value), found)
        for path, value in re.findall(r"^(?:--)?([a-z_]+(?:\.[a-z_0-9]+)+)(?:\s*=\s*(.+))?$", text):
            if path.split(".")[0] not in sections or path.endswith((".py", ".sh", ".toml", ".json", ".sbatch")):
                continue
            found = key_type(path)
            if value and not text.startswith("--"):
                check_value(*path.rsplit(".", 1), value_of(value), found)
        for key, value in re.findall(r"(?:^|, )([a-z_0-9]+) = ([^,]+(?:,[^=]*\])?)", text):
            if text.startswith("[") or "." in text.split("=")[0] or value_of(value) is None:
                continue
            assert key in keys(), f"{text}: no section has the key {key!r}"
            for declared in keys()[key]:
                try:
                    check_value("", key, value_of(value), declared)
                    break
                except ValueError:
                    continue
            else:
                raise AssertionError(f"{text}: the value does not fit")


@pytest.mark.parametrize("page", OWN_WORDS)
def test_quoted_names_exist_in_the_sources(page: str) -> None:
    """A name that is changed in the sources must be changed in the docs."""
    for text in quoted(page):
        name = text.removeprefix("--").removesuffix("()")
        if re.fullmatch(r"[A-Za-z_][\w.\-]*(=\w+)?", name):
            path = name.split("=")[0]
            missing = [w for w in re.split(r"[.\-]", path) if w and w not in words() and w not in FOREIGN]
            assert not missing or (ROOT / path).exists() or list(ROOT.glob(f"*/**/{path}")), text


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_configuration_are_valid(page: str) -> None:
    for block in blocks(page, "toml"):
        table = tomllib.loads(block)
        for path in table.pop("extends", []):
            assert (ROOT / "train_configs" / path).exists(), path
        check_table(JobConfig, table, "")
    for block in blocks(page, "json"):
        json.loads(block)


def test_the_site_has_all_pages() -> None:
    nav = re.findall(r"- ([\w/]+\.md)$", read("mkdocs.yml").partition("\nnav:")[2], re.M)
    assert sorted(f"docs/{page}" for page in nav) == sorted(page for page in PAGES if page != "README.md")
