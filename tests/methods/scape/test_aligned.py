"""Start and size of every message are multiples of 16 bytes, for NCCL's 16-byte transfers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import train
from torchtitan_scape.topology.in_process import InProcessCollectives
from torchtitan_scape.topology.stages import Codec, Handle


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"code": "int4"},
        {"update": "sharded", "bf16_weights": True},
        {"update": "sharded", "code": "int8"},
    ],
)
def test_all_messages_are_aligned_to_16_bytes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, full exchanges, the warm-up, several chunks at the target density, encoded offsets and a bitmap."""
    seen: set[str] = set()

    def checked(name: str) -> None:
        function = getattr(InProcessCollectives, name)

        def check(self: Any, first: Tensor, second: Any, *rest: Any) -> Handle:
            tensors = [first, second] if name == "_all_gather" else [first]
            assert all(t.data_ptr() % 16 == 0 for t in tensors)
            codec: Codec | None = rest[0] if rest else None
            share = first.numel() // (1 if name == "_all_reduce" and codec is None else self.replicas)
            assert (share * first.element_size() if codec is None else codec.message_bytes(share)) % 16 == 0
            seen.add(name)
            return function(self, first, second, *rest)

        monkeypatch.setattr(InProcessCollectives, name, check)

    for name in ("_all_reduce", "_reduce_scatter", "_all_gather"):
        checked(name)

    def work(collectives: ThreadCollectives) -> list[list[Tensor]]:
        more = {"density": 0.1, "density_warmup_steps": 3, "chunk_bytes": 100, **options}
        return train(collectives, 6, [(7, 9), (33, 5), (1, 1), (20, 20), (7,), (6,)], **more)

    first, *others = run_replicas(3, work)
    assert seen == {"_all_gather", "_reduce_scatter" if "update" in options else "_all_reduce"}
    assert all(torch.equal(a, b) for other in others for a, b in zip(first[-1], other[-1], strict=True))
