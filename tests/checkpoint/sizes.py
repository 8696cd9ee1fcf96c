"""The size of the optimizer's state in a checkpoint, from its metadata."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def bytes_on_disk(path: str) -> dict[str, int]:
    """The bytes of the optimizer's tensors in a checkpoint by kind, of all shards and replicas. Counters of steps and
    results in flight are left out.
    """
    found: dict[str, int] = {}
    for key, stored in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if key.startswith("optimizer.") and isinstance(stored, TensorStorageMetadata):
            kind = key.split(".")[1]
            if not key.endswith(".step") and "in_flight" not in kind:
                kind = "moments" if kind == "state" else kind
                found[kind] = found.get(kind, 0) + stored.size.numel() * stored.properties.dtype.itemsize
    return found
