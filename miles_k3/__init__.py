"""Post-trains Kimi K3 with reinforcement learning: a LoRA trainer and rollout engines on shared weights."""

__version__ = "0.1.0"
