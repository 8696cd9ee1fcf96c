"""Reports of a run: memory, forecast, stragglers, interface traffic, samples and the summary."""
