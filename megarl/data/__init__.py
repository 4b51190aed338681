"""The data of training, and the trajectories of rollouts, as tables whose rows differ in length.

Promises: prompts and SFT examples are read from files with every wrong row named by file and row number;
loaders are deterministic and resume where they stopped; trajectories are Arrow tables with list columns,
zero-copy through Ray's object store and written to Parquet as they are; mini- and micro-batches are planned so
that every data parallel rank runs the same number of micro-batches and no row is lost.

Must not know: ranks, Ray, Megatron, SGLang or the model. Nothing in here pads or computes with
torch; `trajectories.py` and `balance.py`, which workers import, need numpy and pyarrow alone.
"""
