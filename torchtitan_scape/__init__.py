"""Pretraining with sparse and compressed communication between data-parallel replicas.

`replicate` wraps the optimizer of any training loop; `Scape` is the same for the SCAPE method in one constructor. The
public names are imported on first use, without TorchTitan, so that the planner runs where torch is not installed.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_scape.checkpoint.own_loop import checkpoint_states, load_checkpoint
    from torchtitan_scape.methods.co2.options import Co2Options
    from torchtitan_scape.methods.demo.options import DemoOptions
    from torchtitan_scape.methods.dense.options import DenseOptions
    from torchtitan_scape.methods.diloco.options import DilocoOptions
    from torchtitan_scape.methods.noloco.options import NolocoOptions
    from torchtitan_scape.methods.onebit_adam.options import OnebitAdamOptions
    from torchtitan_scape.methods.powersgd.options import PowersgdOptions
    from torchtitan_scape.methods.quantized.options import QuantizedOptions
    from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
    from torchtitan_scape.methods.radius.options import RadiusOptions
    from torchtitan_scape.methods.scape.options import ScapeOptions
    from torchtitan_scape.methods.sparseloco.options import SparselocoOptions
    from torchtitan_scape.methods.sparta.options import SpartaOptions
    from torchtitan_scape.methods.streaming_diloco.options import StreamingDilocoOptions
    from torchtitan_scape.methods.tagc.options import TagcOptions
    from torchtitan_scape.methods.topk.options import TopkOptions
    from torchtitan_scape.optimizers.adams import AdamS
    from torchtitan_scape.optimizers.muon import Muon
    from torchtitan_scape.optimizers.signsgd import SignSGD
    from torchtitan_scape.replica.guard import NonFiniteGradientError
    from torchtitan_scape.replica.optimizer import ReplicaOptimizer
    from torchtitan_scape.replica.replicate import replicate
    from torchtitan_scape.replica.scape import Scape

__version__ = "0.2.0"
__all__ = [
    "AdamS",
    "Co2Options",
    "DemoOptions",
    "DenseOptions",
    "DilocoOptions",
    "Muon",
    "NolocoOptions",
    "NonFiniteGradientError",
    "OnebitAdamOptions",
    "PowersgdOptions",
    "QuantizedOptions",
    "QuantizedUpdateOptions",
    "RadiusOptions",
    "ReplicaOptimizer",
    "Scape",
    "ScapeOptions",
    "SignSGD",
    "SparselocoOptions",
    "SpartaOptions",
    "StreamingDilocoOptions",
    "TagcOptions",
    "TopkOptions",
    "checkpoint_states",
    "load_checkpoint",
    "replicate",
]

_MODULES = {
    "AdamS": "optimizers.adams",
    "Co2Options": "methods.co2.options",
    "DemoOptions": "methods.demo.options",
    "DenseOptions": "methods.dense.options",
    "DilocoOptions": "methods.diloco.options",
    "Muon": "optimizers.muon",
    "NolocoOptions": "methods.noloco.options",
    "NonFiniteGradientError": "replica.guard",
    "OnebitAdamOptions": "methods.onebit_adam.options",
    "PowersgdOptions": "methods.powersgd.options",
    "QuantizedOptions": "methods.quantized.options",
    "QuantizedUpdateOptions": "methods.quantized_update.options",
    "RadiusOptions": "methods.radius.options",
    "ReplicaOptimizer": "replica.optimizer",
    "Scape": "replica.scape",
    "ScapeOptions": "methods.scape.options",
    "SignSGD": "optimizers.signsgd",
    "SparselocoOptions": "methods.sparseloco.options",
    "SpartaOptions": "methods.sparta.options",
    "StreamingDilocoOptions": "methods.streaming_diloco.options",
    "TagcOptions": "methods.tagc.options",
    "TopkOptions": "methods.topk.options",
    "checkpoint_states": "checkpoint.own_loop",
    "load_checkpoint": "checkpoint.own_loop",
    "replicate": "replica.replicate",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


if sys.argv[:1] == ["-m"]:  # Python looks up the module that it will run
    from torchtitan_scape.core.extras import end_in_one_line, is_own_command

    if is_own_command(sys.orig_argv):
        sys.excepthook = end_in_one_line
