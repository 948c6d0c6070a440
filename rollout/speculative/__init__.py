"""Speculative decoding: a small model drafts blocks of tokens, the policy verifies them."""
