"""Collectives of torch.distributed whose names differ between PyTorch releases."""

import torch.distributed as dist

# PyTorch 2.13 renamed both functions and warns about the old names.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
