"""Model sizes, and what TorchTitan's models need to start alike in every layout."""
