"""A Llama from a number of parameters and a few sizes. Plain arithmetic: no torch."""

import math
from dataclasses import replace

from torchtitan_scape.core.workloads import Workload

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
        if not 0 <= value <= 1e15:  # also NaN
            raise ValueError(f"--{name} {value:g}; it must be positive and at most 1e+15")
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
