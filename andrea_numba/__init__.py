"""A GPT trainer and sampler written from scratch in Python, with kernels in Numba."""

__version__ = "0.1.0"
