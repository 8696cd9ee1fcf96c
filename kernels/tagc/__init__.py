"""Passes of TAGC over local tensors: selection, common index of all ranks, and packed values.

Polyakov, Dukhanov, Spirin, "TAGC: Optimizing Gradient Communication in Distributed Transformer Training"
(arXiv:2504.05638).
"""
