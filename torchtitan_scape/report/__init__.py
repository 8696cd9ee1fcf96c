"""Reports of a run: memory, forecast and the summary."""
