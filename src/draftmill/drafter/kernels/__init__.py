"""Triton kernels of the drafter's step, for CUDA. Each has a plain counterpart that tests compare it with."""
