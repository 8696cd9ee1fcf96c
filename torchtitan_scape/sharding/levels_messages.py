"""Cuts of a row as messages: their coded parts by a block code, or as they are, and their raw parts."""

import torch
from torch import Tensor

from kernels.codec.codes import BlockCode
from torchtitan_scape.sharding.base import ParameterSlice
from torchtitan_scape.sharding.levels_layout import RowLayout
from torchtitan_scape.sharding.messages import Parts, RowCodec


class SliceCodec(RowCodec):
    """Of so many cuts that follow each other. Without a code both parts travel in the dtype that they have."""

    def __init__(self, layout: RowLayout, count: int, code: BlockCode | None) -> None:
        coded, raw = count * layout.cut_coded, count * layout.cut_raw
        super().__init__([ParameterSlice("coded", 0, coded, 2), ParameterSlice("raw", coded, raw, 1)], code)
        self._sizes = coded, raw

    def encode(self, parts: Parts, message: Tensor, key: int | None = None) -> None:
        if self.code is None:  # all is raw then
            parts = parts[0][:0], torch.cat(parts)
        super().encode(parts, message, key)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Parts:
        return self._told_apart(super().decode(messages, dtype))

    def decode_and_sum(self, messages: Tensor) -> Parts:
        return self._told_apart(super().decode_and_sum(messages))

    def _told_apart(self, parts: Parts) -> Parts:
        if self.code is not None:
            return parts
        coded, raw = parts[1].split(self._sizes, -1)
        return coded, raw
