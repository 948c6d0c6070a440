"""The engine's forward on Triton kernels, and its decode steps as CUDA graphs."""
