"""README and docs/: what they name exists, and each page is one that a reader finds."""

import json
import re
import tomllib
from dataclasses import fields, is_dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, headings, links, numbers, quoted, read, tables
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import check_table
from torchtitan_scape.core.type_checks import check_value
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.cost import share_of_dense
from torchtitan_scape.methods.demo.options import DemoOptions
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.diloco.options import DilocoOptions
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.powersgd.options import PowersgdOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.radius.options import RadiusOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.sparseloco.options import SparselocoOptions
from torchtitan_scape.methods.sparta.options import SpartaOptions
from torchtitan_scape.methods.streaming_diloco.options import StreamingDilocoOptions
from torchtitan_scape.methods.tagc.options import TagcOptions
from torchtitan_scape.methods.topk.options import TopkOptions
from torchtitan_scape.planner.run import PlannedRun

ROOMS = ("torchtitan_scape", "kernels", "topology", "scripts", "tests", "train_configs", "results", "docs")
QUESTIONS = {
    f"docs/{name}.md"
    for name in (
        *("recipes", "data", "checkpoints", "failures", "simulation", "planning", "exchange", "memory", "kernels"),
        *(
            "own_loop",
            "local_updates",
            "sharding",
            "results",
            "observations",
            "evaluation",
            "architecture",
            "adding_a_method",
        ),
    )
}
# First cell of a table -> other studies that it quotes, and numbers that no report contains, with the reason.
OTHER_NUMBERS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "links between replicas": (
        ("speeches",),
        {"400", "256"},
    ),  # Gb/s of a link; tokens of a replica per step: 4,096 / 16
    "the paper": ((), {"35"}),  # steps after the switch at step 100: the report has step 135
    "method": (("comparison",), set()),  # columns "on code" beside natural English
}
SOURCES = {".py", ".sh", ".sbatch", ".toml"}
# Programs, variables and keys of others.
FOREIGN = {"PATH", "WORLD_SIZE", "text", "offload"}


def key_type(path: str) -> Any:
    """The declared type of a key such as "sync.scape.density". Raises KeyError where the config has none."""
    section: Any = JobConfig
    for name in path.split("."):
        if not is_dataclass(section):
            raise KeyError(path)
        section = {f.name: f.type for f in fields(section)}[name]
    return section


@cache
def keys() -> dict[str, list[Any]]:
    """Key -> its types, in whichever section."""
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
    """Every word of the sources."""
    files = [path for room in ROOMS[:6] for path in (ROOT / room).rglob("*") if path.suffix in SOURCES]
    text = "\n".join(path.read_text() for path in [*files, *ROOT.glob("*.sh"), ROOT / "pyproject.toml"])
    return set(re.findall(r"\w+", text))


def value_of(text: str) -> Any:
    """A TOML value, or None where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None


def test_the_readme_is_short_and_the_pages_are_all_there() -> None:
    assert len(read("README.md").splitlines()) <= 150
    assert set(PAGES) - {"README.md"} == QUESTIONS
    assert set(links("README.md")) >= QUESTIONS


@pytest.mark.parametrize("page", sorted(QUESTIONS))
def test_a_page_opens_with_its_title(page: str) -> None:
    assert read(page).startswith("# ")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
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
            for text in (text for line in lines[2:] for text in numbers(line) if text not in exceptions):
                half = Decimal(5).scaleb(Decimal(text).as_tuple().exponent - 1)  # type: ignore[operator]
                assert any(abs(one - Decimal(text)) <= half for one in known), (
                    f"{text} of {lines[0]} is not in {studies}"
                )


@cache
def report_numbers(study: str) -> list[Decimal]:
    return [Decimal(text) for text in numbers((ROOT / "results" / study / "report.md").read_text())]


@pytest.mark.parametrize("page", PAGES)
def test_quoted_keys_are_known_and_their_values_fit(page: str) -> None:
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


@pytest.mark.parametrize("page", PAGES)
def test_quoted_names_are_in_the_sources(page: str) -> None:
    """A name that was changed in the sources is changed here, too."""
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


def test_the_methods_of_the_readme() -> None:
    """Their names, optimizers, shares of dense bytes and memory, for Llama-1.8B as the planner has it."""
    model = get_workload("llama_1_8b").local(1)

    def share(options: MethodOptions, replicas: int) -> float:
        return 100 * share_of_dense(options, model, replicas)

    def held(options: MethodOptions, replicas: int) -> float:
        own, adams = (sum(PlannedRun(one).device_memory(model, replicas).values()) for one in (options, DenseOptions()))
        return (own - adams) / model.entries

    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", read("README.md"), re.M))
    assert rows.keys() == METHODS.keys()
    for name, entry in METHODS.items():
        assert f"| {', '.join(entry.optimizers)} |" in rows[name]
    coded, plain = ScapeOptions(density=0.05, wire="int4"), ScapeOptions(density=0.1)
    two = ScapeOptions(density=0.025, wire="2bit")
    expected = f"{share(coded, 16):.1f} % at density 0.05 in four bits, {share(two, 4):.1f} % at 0.025 in two, "
    assert f"{expected}{share(plain, 4):.1f} % at 0.1 in FP32" in rows["scape"]
    assert f"{held(coded, 4):.2f} / {held(coded, 16):.2f} at 0.05, {held(two, 16):.2f} at 0.025" in rows["scape"]
    topk, powersgd = TopkOptions(density=0.01), PowersgdOptions(rank=4)
    assert f"{share(topk, 4):.1f} / {share(topk, 16):.1f} % at density 0.01" in rows["topk"]
    assert f"| {held(topk, 4):.1f} / {held(topk, 16):.1f} |" in rows["topk"]
    tagc = TagcOptions(density=0.0125)
    assert f"{share(tagc, 4):.1f} / {share(tagc, 16):.1f} % at density 0.0125" in rows["tagc"]
    assert f"| {held(tagc, 4):.1f} / {held(tagc, 16):.1f} |" in rows["tagc"]
    assert f"{share(powersgd, 4):.2f} % at rank 4" in rows["powersgd"]
    assert f"| {held(powersgd, 16):.1f} |" in rows["powersgd"]
    demo, signs = DemoOptions(), DemoOptions(values="sign")
    assert f"the {demo.k} largest" in rows["demo"]
    for of, sent_by in ((": ", demo), ("their signs: ", signs)):
        assert f"{of}{share(sent_by, 4):.1f} / {share(sent_by, 16):.1f} %" in rows["demo"]
    assert f"| {held(demo, 4):.1f} / {held(demo, 16):.1f} |" in rows["demo"]
    radius = RadiusOptions(density=0.4)
    assert f"{share(radius, 4):.1f} % at density 0.4" in rows["radius"]
    assert f"keep for {radius.interval} steps" in rows["radius"]
    assert f"| {held(radius, 16):.1f} |" in rows["radius"]
    for name, method in (
        ("diloco", DilocoOptions(inner_steps=30)),
        ("streaming_diloco", StreamingDilocoOptions(inner_steps=100)),
    ):
        assert f"every {method.inner_steps} steps" in rows[name] and f": {share(method, 4):.2g} %" in rows[name]
        assert f"| {held(method, 4):.1f} |" in rows[name]
    parts = SpartaOptions(interval=3)
    assert f"in one bit: {share(parts, 4):.1f} %" in rows["sparta"]
    assert f"| {held(parts, 4):.1f} / {held(parts, 16):.1f} |" in rows["sparta"]
    sparse = SparselocoOptions()
    assert f"in two bits: {share(sparse, 4):.2f} / {share(sparse, 16):.2f} %" in rows["sparseloco"]
    assert f"| {held(sparse, 4):.1f} / {held(sparse, 16):.1f} |" in rows["sparseloco"]
    four, eight = QuantizedOptions(), QuantizedOptions(code="int8")
    assert f"{share(four, 4):.1f} % (in eight: {share(eight, 16):.1f} %)" in rows["quantized"]
    assert f"| {held(four, 16):.1f} |" in rows["quantized"]
