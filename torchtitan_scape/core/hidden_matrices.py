"""The default rule for the matrices that Muon updates, from names and shapes of parameters. No torch.

Muon is for hidden layers: linear maps between activations. Its authors leave embeddings, output heads and vectors to
AdamW. Names of modules say which matrices these are, because models number the members of their lists of blocks.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

_PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original\d*")  # of torch.nn.utils.parametrize
# A number, or a module with a number of its own, such as torchvision's `encoder_layer_0`.
_NUMBERED = re.compile(r"\d+|(?:\w+_)?(?:layer|block)s?_?\d+")
# Lists whose members are hidden layers even if they are single layers. Members of other lists have parts, as blocks do:
# an `nn.Sequential` of single layers is often a head, a projection of inputs, or a whole model.
_LIST_OF_LAYERS = re.compile(r"h|\w*(?:layer|block|hidden)\w*(?<!\d)")
# Anywhere in the block: embeddings and tables, and the factors of LoRA, whose product is the matrix.
_TABLE = re.compile(r"embed|codebook|(?:^|_)(?:emb|embs|embd|wte|wpe|lora|cpb)(?:_|$)|(?:^|_)rel(?:ative)?_?pos")
# A module to the left of the list: embeddings, but not a whole model that is called `embedder`.
_EMBEDDING = re.compile(r"(?:\w+_)?(?:emb|embd|embed|embedding)s?")
# A module anywhere in the block, outside of attention: an output head. `heads` of a block are those of attention.
_NAMED_HEAD = r"(?!multi|(?:q|k|v|o|kv|qkv|query|key|value)_)(?:\w+_)?head"
_HEAD = re.compile(rf"{_NAMED_HEAD}|classifier")
# The list or a module to the left of it.
_HEADS = re.compile(rf"{_NAMED_HEAD}s?|classifiers?|scores?")
_ATTENTION = re.compile(r"att(?:n|ention)?s?(?![a-z])|^(?:sa|mha)$")
# The parameter or its module: biases of several dimensions, and the weights of norms.
_VECTOR = re.compile(r"(?:^|_)bias|norm(?:_?\d+)?$|(?:^|_)norm_|(?:^|_)ln(?:_|\d|$)")
# The parameter itself: state-space models' A_log and the like, RWKV's time_decay and r_k, learned tokens, and factors.
_NO_MAP = re.compile(
    r"(?:^|_)(?:log|imag|real)(?:_|$)|^time_|^r_k$|(?:^|_)(?:tokens?|latents?|prompts?|registers?)$"
    r"|^(?:gamma|beta|alpha|lambda|scale|gain)s?$"
)
_STATE_SPACE = re.compile(r"[ABCD]")  # of the original S4 and S5
_EXPERTS = re.compile(r"expert|moe")


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter by default.

    These are the matrices, and the stacks of matrices of experts, (experts, rows, columns), inside a numbered list of
    blocks, for example `layers.0.attention.wq.weight`. Embeddings, position tables, output heads, norms, biases,
    factors of LoRA, the parameters of state-space recurrences, and shapes with a dimension of 1 are left out by their
    names and shapes.
    """
    if len(shape) not in (2, 3) or 1 in shape:
        return False
    path = _path_of_map(name)
    return bool(path) and (len(shape) == 2 or any(_EXPERTS.search(part) for part in path))


def default_hidden_names(names: Iterable[str], shapes: Iterable[Sequence[int]]) -> frozenset[str]:
    """Return the names of the parameters that Muon updates by default."""
    return frozenset(name for name, shape in zip(names, shapes, strict=True) if is_hidden_matrix(name, shape))


def is_unknown_stack(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter of a block may be a stack of matrices, which its name does not say.

    The weights of one-dimensional convolutions have three dimensions as well.
    """
    if len(shape) != 3 or 1 in shape or is_hidden_matrix(name, shape):
        return False
    path = _path_of_map(name)
    return bool(path) and not any("conv" in part for part in path)


def _path_of_map(name: str) -> list[str]:
    """Return the path of a linear map from its list of blocks on, in lower case; [] if the name says otherwise."""
    left, inside = _path_in_block(name)
    if not inside or _STATE_SPACE.fullmatch(inside[-1]):
        return []
    left, inside = [part.lower() for part in left], [part.lower() for part in inside]
    path = [left[-1], *inside]
    if any(map(_TABLE.search, path)) or any(map(_EMBEDDING.fullmatch, left)):
        return []
    if _has_head(left, _HEADS) or _has_head(path, _HEAD):
        return []
    return [] if any(map(_VECTOR.search, path[-2:])) or _NO_MAP.search(path[-1]) else path


def _has_head(path: Sequence[str], head: re.Pattern[str]) -> bool:
    return any(head.fullmatch(part) and not _ATTENTION.search(parent) for parent, part in pairwise(["", *path]))


def _path_in_block(name: str) -> tuple[list[str], list[str]]:
    """Return the path to a list of blocks and the path in a block, without numbers; [] twice outside of such lists.

    A list has a name: the members of an `nn.Sequential` that is the model itself are its first and its last layer too.
    """
    parts = _PARAMETRIZED.sub(r"\1", name).split(".")
    for i, part in enumerate(parts):
        named = [p for p in parts[: i + 1] if not p.isdigit()]
        if not named or not _NUMBERED.fullmatch(part):
            continue
        inside = [p for p in parts[i + 1 :] if not p.isdigit()]
        if len(inside) > 1 or (inside and part.isdigit() and _LIST_OF_LAYERS.fullmatch(named[-1].lower())):
            return named, inside
    return [], []
