"""How many drafted tokens of each request are worth verifying: what they cost, what they are worth, which to take."""
