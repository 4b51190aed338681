"""SGLang as a rollout engine: how its processes are started, what they are asked, how they end."""
