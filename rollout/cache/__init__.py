"""The hybrid cache: append-only KV and overwritten recurrent states."""
