"""Cost of SCAPE, computed by the kernels' size functions. Imports no torch."""

import math
from collections.abc import Sequence

from torchtitan_scape.core.workloads import LocalModel, Shapes, count_entries
from torchtitan_scape.kernels.codec.formats import BLOCK as CODED_BLOCK
from torchtitan_scape.kernels.codec.formats import FORMATS, dtype_bytes, encoded_size
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.scape.payload import (
    block_layout,
    dense_sizes,
    mask_bytes,
    owned_entries,
    payload_entries,
    row_entries,
    sector_bytes,
)
from torchtitan_scape.topology.calls import CollectiveCall, padded_size
from torchtitan_scape.topology.ring_bytes import LevelSize


class ScapeCost(MethodOptions):
    """Cost of a step with `ScapeOptions`: an all-reduce of the payload, and an all-gather of masks that overlaps with
    the next step.

    With `update = "sharded"` the payload is reduce-scattered to the owners of its entries, and the new values are
    all-gathered.
    """

    holds_optimizer_state = True

    density: float
    block_size: int
    selection: str
    code: str
    update: str
    weights_dtype: str
    offload: list[str]

    # ------------------------------------------------------------------------------- derived options

    @property
    def sharded(self) -> bool:
        """Whether each entry's owner updates it for all replicas."""
        return self.update == "sharded"

    @property
    def payload_code(self) -> str:
        """Encoding of the payload at the target density; a dense payload is in FP32."""
        return "float32" if self.density >= 1.0 else self.code

    @property
    def scalar_reductions(self) -> int:
        """Number of scalar all-reduces: the finite flag and, with a sharded update, the norm."""
        return 2 if self.sharded else 1

    @property
    def has_master(self) -> bool:
        """Whether there is an FP32 master copy of the weights, which are in BF16."""
        return self.weights_dtype == "bfloat16"

    # --------------------------------------------------------------------------------------- exchange

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        """Return the collectives of a step. The payload counts as one chunk: the chunk size depends on the machine."""
        shapes, code = model.shapes, self.payload_code
        replicas = math.prod(level.size for level in levels)
        block = CODED_BLOCK if code in FORMATS else None
        multiple = block or 1
        own_mask = mask_bytes(shapes, self.density, replicas, self.block_size, self.selection)
        masks = CollectiveCall("all_gather", own_mask, hidden=True)
        if not self.sharded:
            entries = payload_entries(shapes, self.density, self.block_size, multiple, self.selection, replicas)
            return [CollectiveCall("all_reduce", padded_size(entries, levels, block), encoded_size(code)), masks]
        own = row_entries(shapes, self.density, replicas, self.block_size, multiple, self.selection)
        payload = CollectiveCall("reduce_scatter", own * replicas, encoded_size(code))
        values = dtype_bytes(self.weights_dtype) if self.density < 1.0 else 4
        return [payload, CollectiveCall("all_gather", values * own), masks]

    # ----------------------------------------------------------------------------------------- passes

    def pass_bytes(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the minimum memory traffic of each pass in bytes: every input read once, every output written once.

        Entries of a mask that are scattered in a tensor count as the sectors that contain them (`sector_bytes`);
        payloads are contiguous.
        """
        shapes = model.shapes
        n, k = count_entries(shapes), payload_entries(shapes, self.density, self.block_size)
        masks = 2 * block_layout(shapes, replicas, self.block_size).mask_bytes()
        bf16_weights = self.weights_dtype == "bfloat16"
        if not self.sharded:
            return {
                "finite": 4.0 * n,
                # Gradient, state twice; payload and last moment, moment of the previous mask, lists of both masks.
                "pack": 12.0 * n + masks + (8 + 4 + 4) * k,
                "squares": 8.0 * k,
                # Read and write the parameter; with a master, read and write the master, read it again and write the
                # rounded parameter. Payload, last moment and its new value, list of the mask; the previous mask, and
                # both again, to count the entries that enter each row and column.
                "update": (14.0 if bf16_weights else 8.0) * n + 1.5 * masks + (4 + 8 + 2) * k,
            } | self._coding_bytes(shapes, k, replicas)
        # In the packing pass the owner reads and writes the replicated part of the state. For the norm it reads payload
        # and replicated state of the mask's entries. For the update it reads both again, and the parameter unless there
        # is a master; it writes the state and the new values. All ranks write the new values. BF16 weights decay by
        # their scale, without a pass over the entries.
        owned, sent = owned_entries(shapes, replicas, self.block_size), k / replicas
        update = 12 * sent + (3 if bf16_weights else 4) * self._scattered(shapes) / replicas + masks + 4 * k
        update += self._scattered(shapes, 2) + 8 * owned if bf16_weights else 8 * n
        passes = {"finite": 4.0 * n, "pack": 12.0 * n + masks + (4 + 4) * k + 8 * owned, "squares and update": update}
        return passes | self._coding_bytes(shapes, k, replicas)

    def _scattered(self, shapes: Shapes, nbytes: int = 4) -> float:
        """Return the bytes that move if a pass reads, or writes, the entries of a mask in whole tensors."""
        return sector_bytes(shapes, self.density, nbytes, self.block_size)

    def carry_bytes(self, model: LocalModel) -> float:
        """Return the memory traffic of adding the last quantization error to the gradients, in bytes."""
        shapes = model.shapes
        return self._carry_bytes(shapes, payload_entries(shapes, self.density, self.block_size))

    def _carry_bytes(self, shapes: Shapes, sent: float) -> float:
        return 4 * sent + self._scattered(shapes)  # part of packing, which reads the gradients

    def _coding_bytes(self, shapes: Shapes, sent: float, replicas: int) -> dict[str, float]:
        """Return the memory traffic of encoding and decoding in bytes.

        Read the error, add it to the gradient of the next step, and store it if this step is applied; write the
        message, read all received messages, encode the owner's mean, read and decode the means.
        """
        payload, own = encoded_size(self.payload_code), sent / replicas
        if payload is None:
            return {}
        message = payload(int(sent)) / max(1.0, sent)
        total = self._carry_bytes(shapes, sent) + (12 + 4 + message + 4 + message) * sent + (4 + 8) * own
        total += 0.0 if self.sharded else (4 + message + 4 + 20) * own + (message + 4) * sent
        return {"coding": total} if total else {}

    def memory_traffic(
        self, model: LocalModel, replicas: int, several_levels: bool = False, overlap: bool = False
    ) -> tuple[float, float]:
        passes = self.pass_bytes(model, replicas)
        return passes.pop("pack"), sum(passes.values())

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the traffic of (the packing pass, the other passes) in bytes.

        The packing pass copies the state to the device and back. With a replicated update, the update does so for the
        tensors that are not sparsified, and with the selection "tensor" for all.
        """
        host = self.host_memory(model, replicas)
        state = host.get("state", 0.0)
        whole = state if self.selection == "tensor" else min(state, 4.0 * sum(dense_sizes(model.shapes)))
        rest = host.get("master", 0.0) + host.get("owned master", 0.0) + (0.0 if self.sharded else whole)
        return 2 * state, 2 * rest

    # ----------------------------------------------------------------------------------------- memory

    def temporary_memory(
        self, model: LocalModel, replicas: int, several_levels: bool = False, overlap: bool = False
    ) -> dict[str, float]:
        """Return nothing: payload and masks are kept."""
        return {}

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        shapes = model.shapes
        n, layout = count_entries(shapes), block_layout(shapes, replicas, self.block_size)
        # At density 1 the payload replaces the gradients in place.
        entries = payload_entries(shapes, self.density, self.block_size) if self.density < 1.0 else 0
        # The payload and the previous moment of its entries; with a code also the quantization errors of two steps.
        payload = (4.0 if self.sharded else 8.0) * entries
        offloaded = self.host_memory(model, replicas)
        kinds = {"parameters": float(dtype_bytes(self.weights_dtype)) * n, "gradients": 4.0 * n}
        kinds |= {kind: value for kind, value in self._states(shapes, replicas).items() if kind not in offloaded}
        kinds |= {
            "masks": 2.0 * layout.mask_bytes() + layout.wire_bytes(self.density, "block"),
            "payload": payload + (0.0 if self.payload_code == "float32" else 8.0 * entries),
            "mask lists": self._list_bytes(entries),
            "rates of visits": 16.0 * sum(s[0] + math.prod(s[1:]) for s in shapes if len(s) > 1),
        }
        if offloaded:
            kinds["offload buffers"] = len(offloaded) * self._buffer_bytes(shapes, replicas)
        return kinds

    def _list_bytes(self, entries: int) -> float:
        """Return the bytes of the lists of both masks.

        entries: Those of the payload; the few of tensors that are not sparsified are in no list.
        """
        return 0.0 if self.selection == "tensor" else 4.0 * entries

    def _states(self, shapes: Shapes, replicas: int) -> dict[str, float]:
        """Return the bytes of the states by kind, on the device or on the host."""
        n = 4.0 * count_entries(shapes)
        if not self.sharded:
            return {"state": n} | ({"master": n} if self.has_master else {})
        owned = 4.0 * owned_entries(shapes, replicas, self.block_size)
        states = {"state": n - 4.0 * sum(dense_sizes(shapes)), "owned moments": owned}
        return states | ({"owned master": owned} if self.has_master else {})

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the offloaded states in bytes; a state that is not larger than its buffers stays on the device."""
        shapes, kinds_of = model.shapes, {"state": ("state",), "master": ("master", "owned master")}
        kinds = {kind for name in self.offload for kind in kinds_of[name]}
        states, buffers = self._states(shapes, replicas), self._buffer_bytes(shapes, replicas)
        return {kind: value for kind, value in states.items() if kind in kinds and value > buffers}

    def _buffer_bytes(self, shapes: Shapes, replicas: int) -> float:
        """Return the bytes of three buffers of the largest tensor, in a sharded update of an owner's largest slice."""
        largest = max(map(math.prod, shapes))
        if self.sharded:
            largest = min(largest, owned_entries(shapes, replicas, self.block_size))
        return 12.0 * largest
