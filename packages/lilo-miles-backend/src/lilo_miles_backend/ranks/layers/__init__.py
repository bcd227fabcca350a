"""Layers: one decoder layer as one autograd node, which keeps for its backward what its level says."""
