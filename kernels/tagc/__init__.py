"""TAGC's passes over local tensors: selection, an index that all share, values at its places, or in a count sketch.

Polyakov, Dukhanov, Spirin, "TAGC: Optimizing Gradient Communication in Distributed Transformer Training"
(arXiv:2504.05638), on Li et al., "Accelerating Distributed Deep Learning using Lossless Homomorphic Compression"
(arXiv:2402.07529).
"""
