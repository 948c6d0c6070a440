"""Kimi K3's layers for training: frozen weights on megatron's parallel linears, trainable factors beside them."""
