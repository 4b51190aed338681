"""Sparse attention (DeepSeek-V3.2, GLM-5): a query attends to the keys that an indexer chooses, in packed sequences and in every layout.

DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv:2512.02556), section 2.1. Megatron-core 0.19.2 has it, too (experimental_attention_variant/dsa.py),
and gives these modules the inputs of its own. Its layers are not used: they have norms and weights under names of their own, keep the
scores of all pairs of a micro-batch's tokens, across its sequences and for each head of the indexers, and leave open which of equal scores
are chosen.

Promises:
- A choice never crosses the bounds of a packed sequence, and is the same on every rank that has heads of a query.
- Of equal scores the earlier key is chosen, as by megarl's engines on CPUs.
- Queries before which there are fewer than `topk` keys attend to all of them. A micro-batch whose sequences have no more tokens than that is
  computed by the attention of models without indexers.
- Indexers learn from a loss of their own, if at all (learning.py).
- Scores exist for some rows at a time (`selection.LIMIT` bytes), in the forward pass and in the backward pass, which makes them anew.
"""
