"""Kernels: the arithmetic inside a layer, one implementation per device, chosen once at start."""
