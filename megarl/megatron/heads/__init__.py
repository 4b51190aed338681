"""The outputs of a vocab-parallel language model head, without holding its logits: log-probabilities, entropy, the divergence from another
head; and the value head.

On a GPU log-probabilities and entropies are computed by `fused_head`; `log_probs`' torch code computes the same on a CPU. Divergences, over the whole
vocabulary (`divergence`) or the other's most likely tokens (`top_tokens`), are torch code on both. `outputs` has what a model's last stage gives.

Promises:
- The largest temporary tensors have `chunk_tokens` rows of this rank's share of the vocabulary (one of them for log-probabilities, a few
  for a divergence): logits are computed a chunk of tokens at a time, reduced to a few numbers a token, dropped, and recomputed in the
  backward pass. The only other large tensor is the output weight's own gradient.
- Logits are never gathered over tensor-parallel ranks; a chunk costs two all-reduces, of its maxima and of a few
  sums a token, and one more for divergences other than the KL (on a GPU all chunks together cost one gathering of four numbers a token).
- Rows that pad the vocabulary take no probability: they are left out of every product.
- `lm_head` spends nothing on tokens that do not count, such as prompts.
- Two heads that are equal have a KL of exactly 0, and pass no gradient.
- A divergence's sums are in float32 whatever the models' dtype.
"""
