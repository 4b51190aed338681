"""SGLang as a rollout engine: the start of its processes, its requests, its memory, its end."""
