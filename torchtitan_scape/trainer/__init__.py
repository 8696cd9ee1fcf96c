"""The trainer: subclasses of TorchTitan's trainer, checkpoint manager, metrics, validator and optimizers."""
