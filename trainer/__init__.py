"""The LoRA trainer on megatron-core."""
