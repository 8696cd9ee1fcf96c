"""Recommendation of a method, its density and a layout, before the first job.

    python -m torchtitan_scape.planner.plan --machine frontier --nodes 48 --model llama_1_8b
    python -m torchtitan_scape.planner.plan --machine vista --nodes 64 --model llama_1_8b --network-bandwidth 3.5
    python -m torchtitan_scape.planner.plan --machine vista --nodes 64 --model train_configs/radius_2b.toml
    python -m torchtitan_scape.planner.plan --machine vista --nodes 64 --parameters 7e9 --layers 32 --width 4096

Presets have nominal figures. A shared network or an unfavorable placement provides a fraction of them (a fourteenth in
the SCAPE paper's runs), which changes the answer: measure with `torchtitan_scape.doctor` and pass its JSON as --links.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtitan_scape.core.command import Parser, print_text
from torchtitan_scape.core.workloads import WORKLOADS, Workload
from torchtitan_scape.planner.candidates import (
    COMPARED,
    COMPRESSED,
    DENSE,
    MOST_RANKS,
    Advice,
    Candidate,
    PlanRequest,
    advise,
    break_even_bandwidth,
    by_nodes,
    candidates,
    fastest,
    make_request,
)
from torchtitan_scape.planner.run import DEFAULT_SAVING, CheckpointCost, Saving, checkpoint_bytes
from torchtitan_scape.planner.step import Assumptions
from torchtitan_scape.topology.machines import Links, get_machine

DEFAULT = "llama_1_8b"
NUMBERS = ("parameters", "layers", "width", "heads", "kv_heads", "vocab")

# ----------------------------------------------------------------------------------------------- text


def report(
    case: PlanRequest, configured: tuple[Candidate, str] | None = None, saving: Saving | None = DEFAULT_SAVING
) -> Iterator[str]:
    """Return the lines of the answer.

    Args:
        configured: The run that a recipe describes, and the form of its shard axis.
        saving: Its checkpoints; None if it writes none.
    """
    advice = advise(case)
    yield from _question(case)
    yield ""
    if configured:
        yield from _as_configured(case, *configured, advice, saving)
        yield ""
    yield from _answer(case, advice)
    if saving and not configured:
        yield _checkpoint(case, advice.choice, saving)
    yield ""
    yield from _recipe_lines(case, advice.choice)
    yield ""
    yield from _table(case)
    yield ""
    yield from _losses(case, advice)


def _question(case: PlanRequest) -> Iterator[str]:
    w, a, device = case.workload, case.assumptions, case.machine.device
    yield (
        f"{w.name}, {_count(w.parameters)} parameters, on {case.nodes} node(s) of {case.machine.name}: "
        f"{case.ranks} ranks ({device.name}, {device.memory:.1f} GB), {case.batch} sequences of {w.sequence} tokens "
        "a step"
    )
    if case.batch != w.batch:
        yield f"(its usual batch is {w.batch}; --global-batch takes another multiple of {case.ranks})"
    spans = ", ".join(
        f"{name} {link.bandwidth / 1e9:g} GB/s {link.latency * 1e6:.3g} us" for name, link in case.links.levels.items()
    )
    yield f"Links, per rank: {spans} ({case.links.source})"
    memory = "measured" if case.links.memory_bandwidth else f"{100 * a.memory_efficiency:.0f} % of nominal"
    yield (
        f"Assumed: {100 * a.mfu:.0f} % of {device.peak:g} TFLOP/s in forward and backward; memory bandwidth in "
        f"the optimizer {memory}; {w.recomputation.describe()}; dense and quantized gradients hidden behind the last "
        "micro-batch's backward pass as far as it lasts"
    )


def _as_configured(
    case: PlanRequest, own: Candidate, shard_axis: str, advice: Advice | None, saving: Saving | None
) -> Iterator[str]:
    p, layout = own.prediction, own.layout
    yield (
        f"The recipe as it is: {p.method.name}, {layout.replicate} replica(s) of {layout.shard} rank(s), "
        f"{shard_axis}, micro-batches of {own.micro_batch}: {_ms(p.step)} a step, {own.memory / 1e9:.1f} GB a rank: "
        + ("fits" if case.fits(own) else f"does not fit into {case.capacity / 1e9:.1f} GB")
    )
    if advice:
        q, same = advice.choice.prediction, (p.method, layout) == (advice.choice.method, advice.choice.layout)
        gain = f"{p.step / q.step:.2f} x as fast"
        yield "The advice is what the recipe has" if same else f"The advice, {q.method.name}, is {gain} as the recipe"
    if saving:
        yield _checkpoint(case, own, saving)


def _checkpoint(case: PlanRequest, run: Candidate, saving: Saving) -> str:
    layout = run.layout
    kinds = checkpoint_bytes(run.method, case.workload.whole(), layout.replicate, saving.residual, layout.shard)
    return CheckpointCost(kinds, case.ranks, case.machine, case.links, saving).describe()


def _answer(case: PlanRequest, advice: Advice) -> Iterator[str]:
    chosen, dense, percent = advice.choice, advice.dense, 100 * (advice.gain - 1)
    q = chosen.prediction
    if advice.compress:
        if dense:
            instead = f" against {_ms(dense.prediction.step)} with dense {dense.method.name}, {_gain(advice)}"
        else:
            instead = f"; dense training does not fit: {fastest(case, DENSE).memory / 1e9:.1f} GB a rank at least"
        yield f"Compress: yes. {q.method.name}: {_ms(q.step)} a step{instead}"
        yield (
            "It sends the most of the advised methods within 10 % of the fastest; docs/how_to/choose_a_method.md has "
            "the losses of all of them"
        )
    elif advice.compressed:
        yield (
            f"Compress: no. {advice.compressed.method.name} would {'gain' if percent >= 0 else 'lose'} "
            f"{abs(percent):.1f} %, and a prediction below 3 % is not conclusive: dense {q.method.name} is the safer "
            f"choice, {_ms(q.step)} a step"
        )
    else:
        yield f"Compress: no. Of the advised methods only dense {q.method.name} fits, {_ms(q.step)} a step"
    if case.nodes > 1 and case.links.nominal:
        slow = replace(case, links=case.links.with_bandwidth("network", case.links["network"].bandwidth / 10))
        other = advise(slow)
        yield (
            "These links are nominal. If ranks reach a tenth between nodes (the SCAPE paper's reached a "
            f"fourteenth), the advice is {other.choice.method.name} with shard {other.choice.layout.shard}, "
            f"{_gain(other)}: measure with torchtitan_scape.doctor, pass --links"
        )
    parts = {
        "compute": q.compute,
        "exposed exchange": q.exchange,
        "exposed shard traffic": q.shard,
        "optimizer": q.optimizer,
    }
    yield "Step time: " + ", ".join(f"{name} {_ms(t)} ({100 * t / q.step:.0f} %)" for name, t in parts.items())
    if q.hidden:
        yield f"Hidden behind compute: {'gradients' if q.method.overlap else 'the masks'}, {_ms(q.hidden)} of exchange"
    sent = ", ".join(f"{level} {nbytes / 1e6:.1f} MB" for level, nbytes in q.sent.items()) or "nothing"
    of_dense = sum((dense or fastest(case, DENSE)).prediction.sent.values())
    yield f"Sent per rank and step between replicas: {sent} (dense: {of_dense / 1e6:.0f} MB)"
    yield f"Layout: {chosen.layout.describe()}"
    kinds = ", ".join(f"{kind} {nbytes / 1e9:.1f}" for kind, nbytes in q.memory.items())
    yield (
        f"Memory a rank, estimated: {chosen.memory / 1e9:.1f} GB of {case.capacity / 1e9:.1f} "
        f"({100 * case.assumptions.usable_memory:.0f} % of the device): {kinds}"
    )


def _recipe_lines(case: PlanRequest, chosen: Candidate) -> Iterator[str]:
    method, layout = chosen.method, chosen.layout
    yield "[training]"
    yield f"global_batch_size = {case.batch}"
    yield f"local_batch_size = {chosen.micro_batch}"
    yield f"seq_len = {case.workload.sequence}"
    yield "[parallelism]"
    yield f"data_parallel_replicate_degree = {layout.replicate}"
    yield f"data_parallel_shard_degree = {layout.shard}"
    yield "[optimizer]"
    yield f'name = "{method.optimizer}"'
    if method.optimizer == "Muon":
        yield "beta1 = 0.95"
    yield "[sync]"
    yield f'method = "{method.options.method_name()}"'
    if method.overlap:
        yield "overlap = true"
    if method.options.main_options:
        yield f"[{method.options.section}]"
    for key in method.options.main_options:
        value = getattr(method.options, key)
        yield f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value:g}"


def _table(case: PlanRequest) -> Iterator[str]:
    yield "Every method on its fastest layout that fits, compared in time only (ms):"
    methods = (*DENSE, *COMPRESSED, *COMPARED)
    width = max(24, *(len(method.name) for method in methods))
    titles = f"{'shard':>6}{'step':>9}{'compute':>9}{'exchange':>10}{'shards':>8}{'optimizer':>11}{'GB':>7}"
    yield f"{'method':<{width}}{titles}"
    for method in methods:
        c = fastest(case, [method])
        if not case.fits(c):
            yield f"{method.name:<{width}}  does not fit: {c.memory / 1e9:.1f} GB a rank at least"
            continue
        p = c.prediction
        times = [1e3 * t for t in (p.step, p.compute, p.exchange, p.shard, p.optimizer)]
        yield (
            f"{method.name:<{width}}{c.layout.shard:>6}{times[0]:>9.1f}{times[1]:>9.1f}{times[2]:>10.1f}{times[3]:>8.1f}"
            f"{times[4]:>11.1f}{c.memory / 1e9:>7.1f}"
        )


def _losses(case: PlanRequest, advice: Advice) -> Iterator[str]:
    yield "Where compression would lose:"
    bandwidth = break_even_bandwidth(case, advice)
    if not advice.dense or not advice.compressed:
        yield f"- at {'any' if advice.dense else 'no'} bandwidth: {_gain(advice)}"
    elif bandwidth == 0:
        yield "- at any bandwidth: replicas have nothing, or next to nothing, to exchange in this layout"
    elif math.isinf(bandwidth):
        yield "- at no bandwidth of the link between replicas: latency and the optimizer's passes decide"
    else:
        yield f"- on links of more than {bandwidth / 1e9:.3g} GB/s a rank between replicas the gain is below 3 %"
    rows = by_nodes(case)
    below = [str(n) for n, _, a in rows if not a.compress]
    gains = ", ".join(f"{n}: {_gain(a)} (batch {batch})" for n, batch, a in rows)
    yield f"- nodes at which the gain is below 3 %: {', '.join(below) or 'none'} of these: {gains}"
    yield "- in loss, if training is short (docs/benchmarks/equal_steps.md); this model predicts time only"


def _gain(advice: Advice) -> str:
    if advice.dense and advice.compressed:
        return f"{advice.gain:.2f} x"
    return f"no {'advised method with compression' if advice.dense else 'dense run'} fits"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} G" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


# ----------------------------------------------------------------------------------------------- JSON


def as_json(case: PlanRequest) -> dict[str, Any]:
    """Return everything that `report` prints, and every candidate. Seconds and bytes."""
    advice = advise(case)
    bandwidth = break_even_bandwidth(case, advice)
    return {
        "schema": "topology.plan/2",
        "model": case.workload.name,
        "machine": case.machine.name,
        "nodes": case.nodes,
        "ranks": case.ranks,
        "global_batch": case.batch,
        "sequence": case.workload.sequence,
        "links": {name: asdict(link) for name, link in case.links.levels.items()},
        "links_source": case.links.source,
        "assumptions": asdict(case.assumptions),
        "compress": advice.compress,
        "gain": _finite(advice.gain),
        "choice": _as_dict(case, advice.choice),
        "dense": advice.dense and _as_dict(case, advice.dense),
        "compressed": advice.compressed and _as_dict(case, advice.compressed),
        "break_even_bandwidth": _finite(bandwidth),
        "by_nodes": [{"nodes": n, "global_batch": b, "gain": _finite(a.gain)} for n, b, a in by_nodes(case)],
        "candidates": [_as_dict(case, c) for c in candidates(case, (*DENSE, *COMPRESSED, *COMPARED))],
    }


def _finite(value: float) -> float | None:
    """Return None for infinity, which JSON does not have."""
    return None if math.isinf(value) else value


def _as_dict(case: PlanRequest, candidate: Candidate) -> dict[str, Any]:
    p, layout = candidate.prediction, candidate.layout
    return {
        "method": p.method.name,
        "replicate": layout.replicate,
        "shard_degree": layout.shard,
        "micro_batch": candidate.micro_batch,
        "step": p.step,
        "fits": case.fits(candidate),
        **{key: value for key, value in asdict(p).items() if key != "method"},
    }


# ------------------------------------------------------------------------------------------------ CLI


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m torchtitan_scape.planner.plan", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--machine", default="vista", help="a preset of topology/machines.toml")
    add("--nodes", type=int, default=1, help=f"1 by default; at most {MOST_RANKS} ranks in all")
    names = ", ".join(WORKLOADS)
    add("--model", help=f"{names}, or a recipe: a.toml, or a.toml,b.toml; {DEFAULT} by default")
    add("--parameters", type=float, default=0.0, help="of a Llama instead of --model, such as 7e9")
    add("--layers", type=int, default=0, help="of that Llama; by default width / 128")
    add("--width", type=int, default=0, help="of that Llama; by default from the parameters")
    add("--heads", type=int, default=0, help="of that Llama; by default width / 128")
    add("--kv-heads", type=int, default=0, help="of that Llama; by default as many as heads")
    add("--vocab", type=int, default=0, help="of that Llama; 32000 by default")
    add("--ranks-per-node", type=int, default=0, help="the preset's by default")
    add("--links", type=Path, help="JSON of torchtitan_scape.doctor, instead of the preset's links")
    add("--network-bandwidth", type=float, default=0.0, help="measured GB/s of a rank between nodes")
    add("--global-batch", type=int, default=0, help="sequences a step; the model's, rounded to the ranks, by default")
    add("--seq-len", type=int, default=0)
    add("--mfu", type=float, default=Assumptions().mfu, help="share of the peak that forward and backward reach")
    add("--json", action="store_true")
    return parser


def _model(options: argparse.Namespace) -> tuple[Workload, Any]:
    """Return the model that the options name, or describe by numbers, and the recipe's configuration or None.

    Raises:
        ValueError: There is no such model.
    """
    numbers = {name: getattr(options, name) for name in NUMBERS}
    if any(numbers.values()):
        if options.model:
            raise ValueError(f"--model {options.model} and numbers of another model; give the name or the numbers")
        return workload_of_numbers(**numbers), None
    name = options.model or DEFAULT
    if name in WORKLOADS:
        return WORKLOADS[name], None
    if not name.endswith(".toml"):
        raise ValueError(f"there is no model {name!r}; known are {', '.join(WORKLOADS)}, and recipes, such as a.toml")
    # A recipe needs torch and TorchTitan, and seconds to import them.
    from torchtitan_scape.models.registry import planned_recipe

    ranks = options.nodes * (options.ranks_per_node or get_machine(options.machine).ranks_per_node or 1)
    logging.disable(logging.WARNING)  # TorchTitan's, of a tokenizer that is not there yet
    try:
        return planned_recipe([f"--job.config_file={name}"], ranks)
    finally:
        logging.disable(logging.NOTSET)


def _report_with_recipe(case: PlanRequest, config: Any) -> Iterator[str]:
    """Return the lines of the answer, for a recipe with the run as it is configured, also if nothing else fits."""
    if config is None:
        yield from report(case)
        return
    from torchtitan_scape.planner.configured import configured_candidate, saving_of

    saving = saving_of(config)
    try:
        own = configured_candidate(config, case)
    except ValueError as error:
        yield from report(case, saving=saving)
        yield f"The recipe as it is has no prediction here: {error}"
        return
    try:
        yield "\n".join(report(case, own, saving))
    except ValueError as error:
        if not case.fits(own[0]):
            raise
        yield from _question(case)
        yield from ["", *_as_configured(case, *own, None, saving)]
        yield f"No method and layout fits: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(arguments)
        links = Links.from_json(options.links) if options.links else None
        workload, config = _model(options)
        case = make_request(
            options.machine,
            options.nodes,
            workload,
            ranks_per_node=options.ranks_per_node,
            links=links,
            network_bandwidth=options.network_bandwidth,
            batch=options.global_batch,
            sequence=options.seq_len,
            assumptions=Assumptions(mfu=options.mfu),
        )
        text = json.dumps(as_json(case), indent=1) if options.json else "\n".join(_report_with_recipe(case, config))
    except ValueError as error:
        print(f"torchtitan_scape.planner.plan: {error}", file=sys.stderr)
        return 2
    print_text(text)
    return 0


HEAD = 128  # entries of a head
ASPECT = 128  # width over layers, as in Llama 2 7B
FFN_STEP = 16
SEQUENCE, BATCH, VOCAB = 2048, 1024, 32000
# Widths of the feed-forward layer, over that of the model, that are taken for a model that is meant.
FFN_RANGE = (0.5, 16.0)


def workload_of_numbers(
    parameters: float = 0, layers: int = 0, width: int = 0, heads: int = 0, kv_heads: int = 0, vocab: int = 0
) -> Workload:
    """Return a Llama with untied output. Values of 0 select a default.

    Defaults: layers and width in a ratio of 1 to 128; heads of 128 entries; as many heads of keys and values; 32,000
    tokens. The width of the feed-forward layer makes up the number of parameters; without that number it is 8/3 of the
    width, rounded up to a multiple of 256.

    Raises:
        ValueError: The numbers make no model; the message names the option and a value that does.
    """
    given = {"layers": layers, "width": width, "heads": heads, "kv-heads": kv_heads, "vocab": vocab}
    for name, value in {"parameters": parameters, **given}.items():
        most = 10_000 if name == "layers" else 1e13
        if not 0 <= value <= most:  # also NaN
            raise ValueError(f"--{name} {value:g}; it must be positive and at most {most:g}")
    if not parameters and not (layers and width):
        raise ValueError("the size of the model is missing; give --parameters 7e9, or --layers 32 --width 4096")
    vocab = vocab or VOCAB
    if not (layers and width):
        layers, width = _shape(parameters, layers, width, vocab)
    heads = heads or max(n for n in range(1, max(1, width // HEAD) + 1) if width % n == 0)
    kv_heads = kv_heads or heads
    for name, value, of, whole in (("heads", heads, "width", width), ("kv-heads", kv_heads, "heads", heads)):
        if whole % value:
            raise ValueError(f"--{name} {value} is no divisor of --{of} {whole}; take {math.gcd(whole, value)}")
    ffn = 256 * math.ceil(8 * width / 3 / 256)
    workload = Workload("", layers, width, heads, kv_heads, ffn, vocab, SEQUENCE, BATCH)
    if parameters:
        workload = _with_parameters(workload, parameters)
    return replace(
        workload, name=f"Llama of {layers} layers, width {width}, feed-forward {workload.ffn}, {heads} heads"
    )


def _shape(parameters: float, layers: int, width: int, vocab: int) -> tuple[int, int]:
    """Return layers and width of about so many parameters, with 12 x width² a layer."""

    def distance(shape: tuple[int, int]) -> float:
        return abs(math.log((12 * shape[0] * shape[1] + 2 * vocab) * shape[1] / parameters))

    if width:
        rest = parameters - 2 * vocab * width
        return max(1, round(rest / (12 * width**2))), width
    widths = range(HEAD, 400 * HEAD + 1, HEAD)
    return min(((layers or max(1, w // ASPECT), w) for w in widths), key=distance)


def _with_parameters(workload: Workload, parameters: float) -> Workload:
    """Return the workload with the width of the feed-forward layer that makes up the parameters."""
    each = 3 * workload.layers * workload.width
    fixed = workload.parameters - each * workload.ffn
    least, most = (fixed + each * factor * workload.width for factor in FFN_RANGE)
    if not least <= parameters <= most:
        raise ValueError(
            f"--parameters {parameters:g} with {workload.layers} layers, width {workload.width} and a vocabulary of "
            f"{workload.vocab}; these make {least:.3g} to {most:.3g} parameters: take such a number, or other "
            "--layers, --width or --vocab"
        )
    exact = (parameters - fixed) / each
    step = FFN_STEP if exact >= 64 * FFN_STEP else 1  # a multiple, as tensor cores need, where it changes little
    return replace(workload, ffn=max(1, step * round(exact / step)))


if __name__ == "__main__":
    sys.exit(main())
