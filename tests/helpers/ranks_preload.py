"""Imported once by the fork server of `helpers.ranks`: what its workers would each spend seconds on."""

import miles_k3.trainer.megatron  # noqa: F401
