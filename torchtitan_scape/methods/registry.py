"""Which methods there are: one line each."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_scape.methods.demo.method import Demo, DemoOptions
from torchtitan_scape.methods.dense.method import Dense, DenseOptions
from torchtitan_scape.methods.diloco.method import Diloco, DilocoOptions
from torchtitan_scape.methods.interface import Method
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.pending import ImportedState, import_state
from torchtitan_scape.methods.powersgd.method import Powersgd, PowersgdOptions
from torchtitan_scape.methods.quantized.method import Quantized, QuantizedOptions
from torchtitan_scape.methods.radius.method import Radius, RadiusOptions
from torchtitan_scape.methods.scape.loading import import_scape_state
from torchtitan_scape.methods.scape.method import ScapeMethod
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.sparseloco.method import Sparseloco, SparselocoOptions
from torchtitan_scape.methods.sparta.method import Sparta, SpartaOptions
from torchtitan_scape.methods.streaming_diloco.method import StreamingDiloco, StreamingDilocoOptions
from torchtitan_scape.methods.tagc.method import Tagc, TagcOptions
from torchtitan_scape.methods.topk.method import Topk, TopkOptions


@dataclass(frozen=True)
class MethodEntry:
    """A method by its name in `[sync] method`.

    options: its section of the configuration. optimizers: the `[optimizer] name`s it goes with.
    method: its class.
    incoming: what a checkpoint of it says to any method: see `methods.pending.import_state`.
    pieces: it is right for parameters that are flat pieces of others, as those on three levels are.
    adds_up: a method that is linear in the gradient and keeps nothing; simulated replicas' gradients may be added up by
        their backward passes before it sees them.
    """

    options: type[MethodOptions]
    optimizers: tuple[str, ...]
    method: type[Method]
    incoming: Callable[..., ImportedState] = import_state
    is_linear: bool = False
    supports_flat_slices: bool = False

    @property
    def supports_overlap(self) -> bool:
        """Whether it goes with `[sync] overlap`."""
        return self.method.supports_overlap


# With which a method goes that only asks for gradients, or parameters that have moved.
ANY = ("AdamW", "AdamS", "Muon", "SignSGD")

METHODS = {
    "dense": MethodEntry(DenseOptions, ANY, Dense, is_linear=True, supports_flat_slices=True),
    "scape": MethodEntry(ScapeOptions, ("AdamS",), ScapeMethod, incoming=import_scape_state, supports_flat_slices=True),
    "topk": MethodEntry(TopkOptions, ANY, Topk),
    "tagc": MethodEntry(TagcOptions, ANY, Tagc),
    "powersgd": MethodEntry(PowersgdOptions, ANY, Powersgd),
    "radius": MethodEntry(RadiusOptions, ("AdamW", "AdamS"), Radius),
    "quantized": MethodEntry(QuantizedOptions, ANY, Quantized),
    "demo": MethodEntry(DemoOptions, ("SignSGD", "AdamW", "AdamS", "Muon"), Demo),
    "diloco": MethodEntry(DilocoOptions, ANY, Diloco),
    "streaming_diloco": MethodEntry(StreamingDilocoOptions, ANY, StreamingDiloco),
    "sparta": MethodEntry(SpartaOptions, ANY, Sparta),
    "sparseloco": MethodEntry(SparselocoOptions, ANY, Sparseloco),
}
