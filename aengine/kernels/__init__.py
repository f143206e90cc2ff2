"""Kernels and their plain-torch twins. The twin is the CPU path and the oracle of the tests."""
