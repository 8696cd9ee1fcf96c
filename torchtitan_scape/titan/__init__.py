"""The only package that imports TorchTitan."""
