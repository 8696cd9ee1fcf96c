"""The reference pages of the configuration, of methods and of the shard axis equal the code: options, defaults, bytes
and memory.
"""

import re
import tomllib
from dataclasses import is_dataclass
from typing import Any

import pytest

from tests.docs.pages import blocks, read, value_of
from torchtitan_scape.config.reference import page, sections
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.options import DenseOptions, MethodOptions, share_of_dense
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.planner.candidates import fastest, make_request
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.sharding.cost import flat_rows
from torchtitan_scape.sharding.options import LevelsOptions, ShardingOptions
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.machines import get_machine

METHODS_PAGE = "docs/reference/methods/index.md"
SHARDING_PAGE = "docs/reference/sharding.md"
LLAMA = get_workload("llama_1_8b").local(1)


def test_the_configuration_page_is_up_to_date() -> None:
    """`python -m torchtitan_scape.config.reference > docs/reference/configuration.md` writes it."""
    assert read("docs/reference/configuration.md") == page()


def test_every_key_has_a_description() -> None:
    assert [f"{one.name}.{key.name}" for one in sections() for key in one.keys if not key.description] == []


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows below a heading of the table that starts with this cell."""
    _, _, table = read(page).partition(f"| {heading} |")
    rows = table.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]


def sent_and_held(options: MethodOptions, replicas: int) -> tuple[str, str]:
    """Return the share of dense bytes and the memory beyond dense AdamS, for Llama-1.8B as the planner has it.

    Without the chunks in flight, which exist during an exchange only.
    """
    kinds = [PlannedRun(one).device_memory(LLAMA, replicas) for one in (options, DenseOptions())]
    own, adams = (sum(one.values()) - one.get("chunks in flight", 0.0) for one in kinds)
    return f"{100 * share_of_dense(options, LLAMA, replicas):.3g} %", f"{(own - adams) / LLAMA.entries:.2f}"


def test_the_table_of_the_methods() -> None:
    """Bytes and memory of every row are the planner's closed forms, and every method has a row with its defaults."""
    with_defaults = []
    for cells in rows_of(METHODS_PAGE, "Method | Setting"):
        name, setting = cells[0].strip("`"), cells[1].strip("`")
        given = {} if setting == "defaults" else tomllib.loads(f"given = {{ {setting} }}")["given"]
        with_defaults += [] if given else [name]
        (sent4, held4), (sent16, held16) = (sent_and_held(METHODS[name].options(**given), n) for n in (4, 16))
        assert cells[2:] == [sent4, sent16, held4, held16], cells
    assert with_defaults == list(METHODS)
    for name in ("README.md", METHODS_PAGE):  # both have the number of methods as a word
        assert "sixteen " in read(name) and len(METHODS) == 16, name


def test_the_predicted_step_times() -> None:
    """`planner.plan --machine vista --nodes 16 --model llama_1_8b` has them, with a --network-bandwidth of Gb/s / 8."""
    rows = rows_of("docs/how_to/choose_a_method.md", "method, optimizer | 400 Gb/s")
    for text, *shown in rows:
        name, optimizer = re.findall(r"`(\w+)`", text)[0], text.rpartition(", ")[2]
        given = tomllib.loads(f"given = {{ {''.join(re.findall('with `(.*)`', text))} }}")["given"]
        run = PlannedRun(METHODS[name].options(**given), optimizer, "overlap" in text)
        for speed, cell in zip((400, 100, 30, 10, 1, 0.1), shown, strict=True):
            case = make_request("vista", 16, "llama_1_8b", network_bandwidth=speed / 8)
            seconds = fastest(case, [run]).prediction.step
            assert cell == (f"{seconds:,.0f}" if seconds >= 99.95 else f"{seconds:#.3g}"), (text, speed)
    assert len(rows) == 7


def test_every_method_has_a_page_and_its_optimizers() -> None:
    families = {(False, False): "gradients", (True, False): "local updates", (False, True): "moment"}
    expected = []
    for name, entry in METHODS.items():
        options = entry.options
        family = families[options.per_replica_weights, options.holds_optimizer_state]
        family = "updates" if options.divides_update else family
        expected.append([f"[`{name}`]({name}.md)", ", ".join(entry.optimizers), family])
    assert rows_of(METHODS_PAGE, "Method | Optimizers") == expected


@pytest.mark.parametrize("name", METHODS)
def test_the_options_of_a_method(name: str) -> None:
    """A method's page lists its keys with their defaults."""
    rows = rows_of(f"docs/reference/methods/{name}.md", f"Key of `[sync.{name}]`")
    listed = {cells[0].strip("`"): value_of(cells[1].strip("`")) for cells in rows}
    assert listed == vars(METHODS[name].options())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dense"])
def test_the_examples_of_a_method(name: str) -> None:
    """MB per step and share of dense, of a table whose replicas are in its heading or in a column."""
    page = f"docs/reference/methods/{name}.md"
    heading = re.search(r"^\| (Setting, Llama-1.8B(?:, (\d+) replicas)?) \|", read(page), re.M)
    assert heading
    for setting, *others, shown, share in rows_of(page, heading[1]):
        given = {} if setting == "default" else tomllib.loads(f"given = {{ {setting.strip('`')} }}")["given"]
        options, replicas = METHODS[name].options(**given), int(heading[2] or others[0])
        assert sent_and_held(options, replicas)[0] == share, setting
        sent = share_of_dense(options, LLAMA, replicas) * 8 * (replicas - 1) / replicas * LLAMA.entries / 1e6
        assert abs(float(shown.replace(",", "")) - sent) <= (0.0501 if "." in shown else 0.501), (setting, sent)


def test_the_options_of_the_shard_axis() -> None:
    page = SHARDING_PAGE
    for section in (ShardingOptions(), TagcShardingOptions(), LevelsOptions()):
        rows = rows_of(page, f"Key of `[{section.section}]`")
        listed = {cells[0].strip("`"): value_of(cells[1].strip("`")) for cells in rows}
        assert listed == {key: value for key, value in vars(section).items() if not is_dataclass(value)}


def test_the_bytes_of_the_shard_axis() -> None:
    """ZeRO++ and TAGC on four nodes of two ranks, three levels on eight nodes of eight, in MB per step."""
    workload = get_workload("llama_1_8b")
    layout = Layout(world_size=8, ranks_per_node=2, machine=get_machine("vista"), replicate=1, shard=8)
    rows = flat_rows(workload, 8)

    def planned(options: ShardingOptions) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
        plan = options.planned(layout, "bfloat16")
        return plan.sent(rows, layout, micro_batches=1), plan.memory({}, rows, layout)

    example = ShardingOptions(**tomllib.loads(blocks(SHARDING_PAGE, "toml")[0])["sharding"])
    for setting, *shown in rows_of(SHARDING_PAGE, "Setting | Weights, network"):
        given = tomllib.loads(f"given = {{ {setting.strip('`')} }}")["given"] if setting.startswith("`") else {}
        sent, _ = planned(example if setting == "the example above" else ShardingOptions(**given))
        ends = [(level, kind) for kind in ("weights", "gradients") for level in ("network", "node")]
        assert shown == [f"{sent[end] / 1e6:,.0f}" for end in ends], setting
    text = read(SHARDING_PAGE)
    held = planned(example)[1]
    assert f"{held['secondary weights'] / 1e6:.0f} MB" in text and f"{held['shard messages'] / 1e6:.0f} MB" in text
    sent, held = planned(ShardingOptions(gradients_code="tagc"))
    assert f"{sent['network', 'gradients'] / 1e6:,.0f} MB of gradients" in text
    assert f"{sent['network', 'index'] / 1e6:.0f} MB" in text and f"{held['shard residual'] / 1e6:,.0f} MB" in text

    frontier = Layout(world_size=64, ranks_per_node=8, machine=get_machine("frontier"), replicate=8, shard=8)
    for (method, *rest), summed in zip(rows_of(SHARDING_PAGE, "Method | GCD pair"), (True, True, False), strict=True):
        code: Any = "int8" if "int8" in method else "float32"
        levels = LevelsOptions(weights=2, gradients=8, sum_code=code)
        options = ShardingOptions(weights_code="int8", gradients_code="int4", levels=levels)
        plan = options.planned(frontier, "bfloat16", sums=summed)
        by_level: dict[str, float] = {}
        for (level, _), nbytes in plan.sent(rows, frontier, 1).items():
            by_level[level] = by_level.get(level, 0.0) + nbytes / 1e6
        network = f"{by_level['network']:,.0f}" if summed else "exchange of the method"
        assert rest == [f"{by_level['gcd_pair']:,.0f}", f"{by_level['node']:,.0f}", network], method
