"""The actor's new weights, from Megatron's shards into SGLang's, before every rollout.

What the room promises:

- what a plan says is what is moved, no more: each slice leaves one trainer rank and reaches the engine ranks that hold it;
- every slice carries a checksum, which is verified where it arrives;
- an engine serves nothing but a whole, verified version;
- two buckets of memory on each side, however large the model is.

It executes plans and decides nothing: who sends what to whom comes from `megarl.layout`. It must not know: Ray, RL.
"""
