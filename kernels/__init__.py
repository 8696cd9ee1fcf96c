"""Passes over local tensors that an optimizer step is made of.

`reference.py` states each of them in plain PyTorch. Nothing here knows of process groups or of the trainer.
"""
