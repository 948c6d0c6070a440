"""How an adapter travels from the trainer to the engines and to disk."""
