"""The operators that SGLang needs to draft tokens by n-grams and keep the accepted ones, in plain torch.

SGLang does this on a CPU, too, with operators of its compiled `sgl_kernel` (sglang 0.5.21). Each is a few lines over numbers of requests
and drafted tokens, which are small. What is drafted (`NgramCorpus`) is SGLang's own C++, which it compiles when it is first used.

A *node* is a token that is to be checked: the newest token of a request, which is the root of a tree, and drafted tokens, each of which
follows one before it. Nodes have numbers within their request, larger than the number of the node that they follow.
"""

import ctypes

import numpy as np
import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    num_nodes: int,
) -> None:
    """Fill in positions, numbers and links of nodes.

    Args:
        tree_mask: bool [batch * nodes * nodes]: whether a node (row) is, or follows, another one (column).
        seq_lens: [batch], tokens before the root.
        positions: [batch * nodes], filled with the nodes' positions in their sequences.
        retrieve_index: [batch, nodes], with numbers over the whole batch.
        retrieve_next_token: [batch, nodes], with the first node that follows each node; -1: none does.
        retrieve_next_sibling: [batch, nodes], with the next node that follows the same node; -1: none does.
    """
    before = tree_mask.view(batch_size, num_nodes, num_nodes).bool().tril(-1)
    number = torch.arange(num_nodes)
    positions.copy_((before.sum(-1) + seq_lens[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * num_nodes).view(batch_size, num_nodes))
    parent = torch.where(before, number, -1).amax(-1)
    follows = (parent[:, :, None] == number) & (parent[:, :, None] >= 0)  # [batch, node, parent]
    later = (
        (parent[:, :, None] == parent[:, None, :]) & (number[:, None] > number) & (parent >= 0)[:, None, :]
    )
    for found, links in ((follows, retrieve_next_token), (later, retrieve_next_sibling)):
        first = torch.where(found, number[:, None], num_nodes).amin(1)
        links.copy_(torch.where(first < num_nodes, first, -1))


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Fill in the cache slots of each request's tokens start..end, one request after the other."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[at : at + last - first] = req_to_token[row, first:last]
        at += last - first


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Fill in the cache slots of accepted nodes, at the beginning of `accept_out_cache_loc`; -1 in `accept_index`: no node."""
    accepted = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(accepted)] = accepted


def copy_all_layer_kv_cache(
    data_ptrs: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copy slots of all layers' caches, all of a layer at once.

    Args:
        data_ptrs, strides: for each layer's keys and values, the address and the bytes of a slot.
        target, source: [n], slots.
    """
    if not len(target):
        return
    target, source = target.numpy(), source.numpy()
    end = 1 + int(max(target.max(), source.max()))
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (end * stride)).from_address(address)
        slots = np.frombuffer(memory, np.uint8).reshape(end, stride)
        slots[target] = slots[source]


# By module of SGLang's kernels: the operators of its CPU build that are supplied here.
OPERATORS = {
    "sgl_kernel": {
        "assign_extend_cache_locs_cpu": assign_extend_cache_locs,
        "copy_all_layer_kv_cache_cpu": copy_all_layer_kv_cache,
        "fill_accept_out_cache_loc_cpu": fill_accept_out_cache_loc,
    },
    "sgl_kernel.speculative": {"reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask},
}
