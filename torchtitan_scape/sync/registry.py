"""Which methods there are: one line each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_scape.sync.base import Method
from torchtitan_scape.sync.demo import Demo, DemoOptions
from torchtitan_scape.sync.dense import Dense, DenseOptions
from torchtitan_scape.sync.diloco import Diloco, DilocoOptions
from torchtitan_scape.sync.options import MethodOptions
from torchtitan_scape.sync.pending import Incoming, incoming_of
from torchtitan_scape.sync.powersgd import Powersgd, PowersgdOptions
from torchtitan_scape.sync.quantized import Quantized, QuantizedOptions
from torchtitan_scape.sync.radius import Radius, RadiusOptions
from torchtitan_scape.sync.scape.build import make_scape
from torchtitan_scape.sync.scape.loading import incoming_from_scape
from torchtitan_scape.sync.scape.options import ScapeOptions
from torchtitan_scape.sync.sparseloco import Sparseloco, SparselocoOptions
from torchtitan_scape.sync.sparta import Sparta, SpartaOptions
from torchtitan_scape.sync.streaming_diloco import StreamingDiloco, StreamingDilocoOptions
from torchtitan_scape.sync.tagc import Tagc, TagcOptions
from torchtitan_scape.sync.topk import Topk, TopkOptions


@dataclass(frozen=True)
class Entry:
    """A method by its name in `[sync] method`.

    options: its section of the configuration. optimizers: the `[optimizer] name`s it goes with.
    method: made of a `Setting` and the options, or
    optimizer: makes an optimizer that is the method as well and owns the whole step.
    incoming: what a checkpoint of it says to any method: see `sync.pending.incoming_of`.
    pieces: it is right for parameters that are flat pieces of others, as those on three levels are.
    adds_up: a method that is linear in the gradient and keeps nothing; simulated replicas' gradients may be added up by
        their backward passes before it sees them.
    """

    options: type[MethodOptions]
    optimizers: tuple[str, ...]
    method: type[Method] | None = None
    optimizer: Callable[..., Any] | None = None
    incoming: Callable[..., Incoming] = incoming_of
    adds_up: bool = False
    pieces: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether it goes with `[sync] overlap`."""
        return self.method is not None and self.method.overlaps


# With which a method goes that only asks for gradients, or parameters that have moved.
ANY = ("AdamW", "AdamS", "Muon", "SignSGD")

METHODS = {
    "dense": Entry(DenseOptions, ANY, Dense, adds_up=True, pieces=True),
    "scape": Entry(ScapeOptions, ("AdamS",), optimizer=make_scape, incoming=incoming_from_scape, pieces=True),
    "topk": Entry(TopkOptions, ANY, Topk),
    "tagc": Entry(TagcOptions, ANY, Tagc),
    "powersgd": Entry(PowersgdOptions, ANY, Powersgd),
    "radius": Entry(RadiusOptions, ("AdamW", "AdamS"), Radius),
    "quantized": Entry(QuantizedOptions, ANY, Quantized),
    "demo": Entry(DemoOptions, ("SignSGD", "AdamW", "AdamS", "Muon"), Demo),
    "diloco": Entry(DilocoOptions, ANY, Diloco),
    "streaming_diloco": Entry(StreamingDilocoOptions, ANY, StreamingDiloco),
    "sparta": Entry(SpartaOptions, ANY, Sparta),
    "sparseloco": Entry(SparselocoOptions, ANY, Sparseloco),
}
