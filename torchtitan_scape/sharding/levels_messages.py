"""Encoding of row slices as messages: the quantized part by a block code or as it is, and the raw part."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.sharding.base import ParameterSlice
from torchtitan_scape.sharding.levels_layout import RowLayout
from torchtitan_scape.sharding.messages import Parts, RowCodec


class SliceCodec(RowCodec):
    """Codec of `count` consecutive row slices. Without a code both parts are sent in their own dtype."""

    def __init__(self, layout: RowLayout, count: int, code: BlockCode | None) -> None:
        coded, raw = count * layout.slice_coded, count * layout.slice_raw
        super().__init__([ParameterSlice("coded", 0, coded, 2), ParameterSlice("raw", coded, raw, 1)], code)
        self._sizes = coded, raw

    def encode(self, parts: Parts, message: Tensor, key: Sequence[int] | None = None) -> None:
        if self.code is None:  # Without a code the message has only a raw part.
            parts = parts[0][..., :0], torch.cat(parts, -1)
        super().encode(parts, message, key)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Parts:
        return self._separate(super().decode(messages, dtype))

    def decode_and_sum(self, messages: Tensor) -> Parts:
        return self._separate(super().decode_and_sum(messages))

    def _separate(self, parts: Parts) -> Parts:
        if self.code is not None:
            return parts
        coded, raw = parts[1].split(self._sizes, -1)
        return coded, raw
