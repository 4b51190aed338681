"""This rank's share of a vocab-parallel output layer: which rows are real, a chunk's logits, where labels lie."""

import torch.distributed as dist
from torch import Tensor


def vocab_share(weight: Tensor, vocab_size: int, tp_group: dist.ProcessGroup) -> tuple[int, int]:
    """The first token of this rank's rows, and how many of them are no padding.

    Args:
        weight: [padded vocab/tp, hidden], rank r's rows of the padded vocabulary.
        vocab_size: real vocabulary; rows from there on are padding.
    """
    share = weight.shape[0]
    start = tp_group.rank() * share
    return start, min(max(vocab_size - start, 0), share)


def chunk_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """float32 [chunk, rows]; the product itself runs in the model's dtype, as in Megatron and SGLang."""
    return (hidden @ weight.t()).float().div_(temperature)


def owned_labels(labels: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each label on this rank (0 where it is another rank's), and whether it is this rank's."""
    local = labels - start
    owned = (local >= 0) & (local < rows)
    return local.masked_fill(~owned, 0), owned
