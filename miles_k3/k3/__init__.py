"""The model, once: configuration, parameter table, oracle, operations and weights."""
