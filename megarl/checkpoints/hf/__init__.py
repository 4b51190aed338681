"""Hugging Face folders: their weights into Megatron's shards and out of them, adapters in PEFT's format.

Promises: a rank reads and writes no more than its share; a file that does not fit the model is refused before a
weight is changed. It must not know: Ray, RL.
"""
