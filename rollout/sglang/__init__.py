"""SGLang as a rollout engine: an unchanged release, what it lacks for K3 with LoRA as a plugin, and the engine."""
