"""The rollout server: an engine behind HTTP, in OpenAI's words and in tokens."""
