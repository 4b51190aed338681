"""The mathematics of the algorithms: advantages, KL, losses, aggregation, metrics.

What this room promises:

- Pure functions of tensors. The controller calls the ones on ragged trajectories (`advantages`, `kl`,
  `aggregate`), every rank calls the ones on packed tokens (`policy_loss`, `value_loss`).
- Losses are sums with weights that already carry the global mini-batch's denominator, and statistics are
  sums. So one function serves every micro-batch on every rank, and the results are added, never averaged:
  no split of the mini-batch changes a loss, a gradient or a metric beyond rounding.
- What stands on a masked token never matters, be it NaN.

Ragged tensors are flat: `x` [tokens] with `offsets` int64 [trajectories + 1]; trajectory i is
`x[offsets[i]:offsets[i + 1]]` (the two buffers of an Arrow list column). Masks are bool [tokens].

What it must not know: ranks, Ray, Megatron, the configuration's tree, files.
"""
