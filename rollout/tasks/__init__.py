"""Sources of prompts and the rewards that grade their answers."""
