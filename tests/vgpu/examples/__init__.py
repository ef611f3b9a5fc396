"""Ordinary numba-cuda programs, from a tiled matrix product to a GPT training step.

They import nothing of the virtual GPU and run unchanged on a real one. `suite` lists them all.
"""
