"""The actor's new weights, from Megatron's shards into SGLang's, before every rollout.

What the room promises:

- exactly the slices of the plan are moved: each leaves one trainer rank and reaches the engine ranks that hold it;
- a process has at most one communicator for syncs, and none with a process that shares its GPU;
- a trainer rank reads a slice once for all engines; those with devices of their own pass it on, so that what leaves the trainer does
  not grow with their number;
- every slice carries a checksum, which is verified where it arrives;
- an engine serves only a complete, verified version;
- each side needs memory for two buckets, however large the model is.

It executes plans and decides nothing: which rank sends which slice to which rank comes from `megarl.layout`. It must not know: Ray, RL.
README.md shows how the files work together.
"""
