"""The ladder of SGLang on a GPU: what it must show there, step by step (scripts/gpu_sglang.py runs it)."""
