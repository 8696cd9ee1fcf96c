"""The list of methods. Implementations are imported on first use, so that importing this module imports no torch."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchtitan_scape.methods.demo.options import DemoOptions
from torchtitan_scape.methods.local_options import Co2Options, DilocoOptions, SparselocoOptions, StreamingDilocoOptions
from torchtitan_scape.methods.noloco.options import NolocoOptions
from torchtitan_scape.methods.onebit_adam.options import OnebitAdamOptions
from torchtitan_scape.methods.options import DenseOptions, MethodOptions
from torchtitan_scape.methods.powersgd.options import PowersgdOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.methods.radius.options import RadiusOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.sparta.options import SpartaOptions
from torchtitan_scape.methods.tagc.options import TagcOptions
from torchtitan_scape.methods.topk.options import TopkOptions

if TYPE_CHECKING:
    from torchtitan_scape.methods.interface import Method

# Optimizers that work with any synchronized gradient or averaged parameter.
ANY_OPTIMIZER = ("AdamW", "AdamS", "Muon", "SignSGD")


@dataclass(frozen=True)
class MethodEntry:
    """A method, registered under its name in `[sync] method`.

    Attributes:
        options: Its TOML section.
        implementation: Its class, or the name of that below `torchtitan_scape.methods`.
        optimizers: Values of `[optimizer] name` that it supports.
        is_linear: Stateless and linear in the gradient: simulated gradients may be summed before the method runs.
        supports_flat_slices: It supports parameters that are flat slices of others ([sharding.levels]).
        supports_pipeline: It supports pipeline stages, where the ranks of a replica have different parameters.
        import_function: A function that reads the method's checkpoints for any other method.
        decoders_function: A function that reads the coordinates of its "pending" states for another layout; "" if none.
    """

    options: type[MethodOptions]
    implementation: "str | type[Method]"
    optimizers: tuple[str, ...] = ANY_OPTIMIZER
    is_linear: bool = False
    supports_flat_slices: bool = False
    supports_pipeline: bool = False
    import_function: str = "imported.import_state"
    decoders_function: str = ""

    @property
    def method(self) -> "type[Method]":
        """Class of the method."""
        named = self.implementation
        method: type[Method] = _import(named) if isinstance(named, str) else named
        return method

    @property
    def import_state(self) -> Any:
        """The function `import_function`."""
        return _import(self.import_function)

    @property
    def saved_decoders(self) -> Any:
        """The function `decoders_function`."""
        return _import(self.decoders_function)

    @property
    def supports_overlap(self) -> bool:
        """Whether the method supports `[sync] overlap`."""
        return self.options().supports_overlap()


def _import(name: str) -> Any:
    """Return the class or function of this name below `torchtitan_scape.methods`."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"torchtitan_scape.methods.{module}"), attribute)


METHODS: dict[str, MethodEntry] = {
    "dense": MethodEntry(
        DenseOptions, "dense.method.Dense", is_linear=True, supports_flat_slices=True, supports_pipeline=True
    ),
    "scape": MethodEntry(
        ScapeOptions,
        "scape.method.ScapeMethod",
        ("AdamS",),
        supports_flat_slices=True,
        supports_pipeline=True,
        import_function="scape.state.import_scape_state",
    ),
    "topk": MethodEntry(TopkOptions, "topk.method.Topk"),
    "tagc": MethodEntry(TagcOptions, "tagc.method.Tagc"),
    "powersgd": MethodEntry(PowersgdOptions, "powersgd.method.Powersgd"),
    "radius": MethodEntry(RadiusOptions, "radius.method.Radius", ("AdamW", "AdamS")),
    "quantized": MethodEntry(QuantizedOptions, "quantized.method.Quantized", supports_pipeline=True),
    "quantized_update": MethodEntry(
        QuantizedUpdateOptions,
        "quantized_update.method.QuantizedUpdate",
        supports_flat_slices=True,
        supports_pipeline=True,
        decoders_function="quantized_update.bases.saved_decoders",
    ),
    "onebit_adam": MethodEntry(OnebitAdamOptions, "onebit_adam.method.OnebitAdam", ("AdamW",)),
    "demo": MethodEntry(DemoOptions, "demo.method.Demo", ("SignSGD", "AdamW", "AdamS", "Muon")),
    "diloco": MethodEntry(DilocoOptions, "local_updates.LocalUpdates"),
    "streaming_diloco": MethodEntry(StreamingDilocoOptions, "local_updates.LocalUpdates"),
    "sparta": MethodEntry(SpartaOptions, "sparta.method.Sparta", supports_pipeline=True),
    "sparseloco": MethodEntry(SparselocoOptions, "local_updates.LocalUpdates"),
    "co2": MethodEntry(Co2Options, "local_updates.Co2"),
    "noloco": MethodEntry(NolocoOptions, "noloco.method.Noloco"),
}


def register(options: type[MethodOptions], implementation: "type[Method]", **settings: Any) -> None:
    """Add a method under the name of its section, for `replicate`, and for recipes that are read afterwards.

    settings: The other attributes of its `MethodEntry`.
    """
    METHODS[options.method_name()] = MethodEntry(options, implementation, **settings)


def implementation_of(options: MethodOptions) -> "type[Method]":
    """Return the class of the method with these options."""
    return METHODS[options.method_name()].method
