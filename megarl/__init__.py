"""megarl: reinforcement learning for language models on Megatron-core, SGLang and Ray.

Importing this package imports nothing else: SGLang's and torch's plugin entry points load
`megarl.rollout.cpu_sglang` while torch itself is still being imported.
"""

__version__ = "0.1.0"
