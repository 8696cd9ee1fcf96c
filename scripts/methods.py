"""Methods as studies name them: METHOD-VALUE-VALUE, for example topk-0.01-2bit or powersgd-4."""

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kernels.codec.formats import FORMATS
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.run import PlannedRun

# Dense training, by the optimizer.
OPTIMIZERS = {"adamw": "AdamW", "adams": "AdamS", "muon": "Muon", "signsgd": "SignSGD"}
CODES = ("bf16", *FORMATS)  # how SCAPE's payload travels, FP32 aside
OVERLAP = "-overlap"  # where the exchange may begin in the backward pass


@dataclass(frozen=True)
class Named:
    """A method by its name.

    options: of the trainer. at_once: further ones, with which a short run soon takes steps as they are in a long one:
    after `settles` of them. period: steps after which its exchanges repeat. planned: as the cost model knows it, and
    measured: the same of those steps.
    """

    name: str
    label: str
    options: tuple[str, ...]
    planned: PlannedRun
    measured: PlannedRun
    at_once: tuple[str, ...] = ()
    settles: int = 0
    period: int = 1


@dataclass(frozen=True)
class Family:
    """Methods of one kind. keys: of its section, in the order in which names have their values; all but the first may
    be left out. at_once: values of others. period: the key that says it. measured: options that
    the cost model takes as others then. Else as `Named`.
    """

    label: str
    keys: tuple[str, ...]
    at_once: tuple[str, ...] = ()
    settles: int = 0
    period: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"


FAMILIES = {
    "topk": Family("top-k", ("density", "values")),
    "tagc": Family("TAGC", ("density",)),
    "powersgd": Family("PowerSGD, rank", ("rank",), ("start=0",)),
    # Between two refreshes, which are dense steps.
    "radius": Family("radius", ("density",), ("start=0", "interval=16"), 16, measured={"interval": 1_000_000}),
    "quantized": Family("quantized", ("code",)),
    "demo": Family("DeMo, k", ("k", "values"), optimizer="SignSGD"),
    "diloco": Family("diloco, H", ("inner_steps", "code"), period="inner_steps"),
    "streaming_diloco": Family("streaming diloco, H", ("inner_steps", "code"), period="inner_steps"),
    "sparta": Family("SPARTA, interval", ("interval", "code"), period="interval"),
    "sparseloco": Family("sparseloco, H", ("inner_steps", "values"), period="inner_steps"),
}
KNOWN = ", ".join(
    [
        "adamw, adams, muon, signsgd, scape-DENSITY, scape-DENSITY-CODE (bf16, int8, int4, ...)",
        *(f"{kind}-{'-'.join(key.upper() for key in family.keys)}" for kind, family in FAMILIES.items()),
        f"and {OVERLAP} after dense and quantized ones",
    ]
)


def parse(name: str) -> Named:
    """Raises ValueError with what is known."""
    plain = name.removesuffix(OVERLAP)
    found = _dense(plain) or _scape(plain) or _of_family(plain)
    if found is not None and plain != name:
        found = _overlapped(found)
    if found is None:
        raise ValueError(f"there is no method {name!r}; known are {KNOWN}")
    return found


def _overlapped(found: Named) -> Named | None:
    try:
        planned, measured = (replace(method, overlap=True) for method in (found.planned, found.measured))
    except ValueError:  # it does not go out in chunks
        return None
    name, label = found.name + OVERLAP, f"{found.label}, overlapped"
    options = (*found.options, "--sync.overlap")
    return replace(found, name=name, label=label, options=options, planned=planned, measured=measured)


def _dense(name: str) -> Named | None:
    if name not in OPTIMIZERS:
        return None
    options = ("--sync.method=dense", f"--optimizer.name={OPTIMIZERS[name]}")
    planned = PlannedRun(DenseOptions(), OPTIMIZERS[name])
    return Named(name, OPTIMIZERS[name], options, planned, planned)


def _scape(name: str) -> Named | None:
    """scape-0.1 (FP32 on the wire), scape-0.047-int4."""
    match = re.fullmatch(rf"scape-(0?\.\d+|1)(?:-({'|'.join(CODES)}))?", name)
    if match is None or not 0 < float(match[1]) <= 1:
        return None
    density, code = match[1], match[2] or ""
    wire = {"": "float32", "bf16": "bfloat16"}.get(code, code)
    # The wire always, as recipes set another.
    options = ["--sync.method=scape", "--optimizer.name=AdamS"]
    options += [f"--sync.scape.density={density}", f"--sync.scape.wire={wire}"]
    planned = PlannedRun(ScapeOptions(density=float(density), wire=wire))  # type: ignore[arg-type]
    return Named(
        name,
        f"SCAPE {density} {code}".strip(),
        tuple(options),
        planned,
        planned,
        at_once=("--sync.scape.density_warmup_steps=0",),
    )


def _of_family(name: str) -> Named | None:
    kind, *texts = name.split("-")
    family = FAMILIES.get(kind)
    if family is None or not 1 <= len(texts) <= len(family.keys):
        return None
    given = dict(zip(family.keys, texts, strict=False))
    types = {f.name: f.type for f in fields(METHODS[kind].options)}
    try:
        section = METHODS[kind].options(**{key: _value(text, types[key]) for key, text in given.items()})
    except ValueError:
        return None
    planned = PlannedRun(section, family.optimizer)
    options = [f"--sync.method={kind}", f"--optimizer.name={family.optimizer}"]
    return Named(
        name,
        " ".join([family.label, *texts]),
        (*options, *(f"--sync.{kind}.{key}={text}" for key, text in given.items())),
        planned,
        replace(planned, options=replace(section, **family.measured)),
        tuple(f"--sync.{kind}.{text}" for text in family.at_once),
        family.settles,
        getattr(section, family.period) if family.period else 1,
    )


def _value(text: str, kind: Any) -> Any:
    return kind(text) if kind in (int, float) else text
