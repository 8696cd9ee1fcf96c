"""Passes of TAGC over local tensors: selection, common index of all ranks, and values, packed or in a count sketch.

Polyakov, Dukhanov, Spirin, "TAGC: Optimizing Gradient Communication in Distributed Transformer Training"
(arXiv:2504.05638), on Li et al., "Accelerating Distributed Deep Learning using Lossless Homomorphic Compression"
(arXiv:2402.07529).
"""
