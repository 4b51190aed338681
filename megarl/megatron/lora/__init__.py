"""Low-rank adapters on a Megatron model, and the frozen model beneath them."""
