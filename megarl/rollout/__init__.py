"""Rollout: engines that turn prompts into trajectories, and the receiver of their weights.

Promises: tokens come with the engine's own log-probs and with the version of the weights that
served them; an engine serves nothing before every byte of its weights was verified in place; an engine
that dies is noticed, and leaves no process behind.

Must not know of Megatron, Ray or of where weights come from: it reads manifests.

This module imports nothing: torch's import loads `cpu_sglang` from here.
"""
