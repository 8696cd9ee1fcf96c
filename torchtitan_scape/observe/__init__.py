"""Observations of Section III of the SCAPE paper: gradients and first moments of a few tensors during a run."""
