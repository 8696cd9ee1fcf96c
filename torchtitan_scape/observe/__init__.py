"""What Section III of the SCAPE paper looks at in a run: gradients and first moments of a few tensors."""
