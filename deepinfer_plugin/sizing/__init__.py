"""How many GPUs a load needs, and what fits into them: memory exactly, times from measured kernels. Needs no GPU."""
