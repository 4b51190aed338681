"""Rollout: engines that turn prompts into trajectories.

Promises: tokens come with the engine's own log-probs and with the version of the weights that
chose them; an engine serves nothing before every byte of its weights was verified in place; an engine
that dies is noticed, and leaves no process behind.

Must not know of Megatron, Ray or where weights come from.

This module imports nothing: a scheduler's process imports it before SGLang.
"""
