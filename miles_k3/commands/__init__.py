"""Commands of the command line, by topic."""
