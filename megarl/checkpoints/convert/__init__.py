"""Converts checkpoints, Hugging Face folders and Megatron's distributed checkpoints, into either kind, and compares them;
merges adapters into a model.

Promises: no process group and no GPU is needed; memory stays below one output file and one tensor of the source, whatever
the model's size; a checkpoint with anything missing, left over or of another shape is neither read nor written; the
output appears complete or not at all, and was checked against the target's own definition before it appears.
"""

from megarl.checkpoints.convert.compare import compare
from megarl.checkpoints.convert.run import convert

__all__ = ["compare", "convert"]
