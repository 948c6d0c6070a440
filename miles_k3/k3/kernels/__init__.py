"""Triton kernels of K3's formulas. Each has its plain twin in `k3/ops`; shapes stand in the docstrings."""
