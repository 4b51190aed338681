"""Weights and gradients that are on a device for a part of a pass, where data parallel ranks share them by Megatron-FSDP."""

from __future__ import annotations

from megarl.costs.tensors import (
    FULL,
    GRADIENT,
    IN_A_LAYER,
    ModelUse,
    SharedBucket,
    StageTensors,
    shared_buckets,
)

# Places in a backward pass: behind the last layer, and before the first one.
HEAD, EMBEDDING = "head", ""


def gathered_bytes(use: ModelUse, tensors: StageTensors) -> tuple[int, int]:
    """The most bytes of gathered weights in a pass: at the head, the weights in no layer; in layers, also a layer's and the next one's."""
    if use.fsdp != FULL:
        return 0, 0
    outside, layers = 0, dict[str, int]()
    for bucket in shared_buckets(use, tensors):
        size = _elements(bucket)
        outside += 0 if bucket.layer else size
        layers[bucket.layer] = layers.get(bucket.layer, 0) + size * bool(bucket.layer)
    two = sum(sorted(layers.values(), reverse=True)[:2])
    return use.itemsize * outside, use.itemsize * (outside + two)


def whole_bytes(use: ModelUse, tensors: StageTensors) -> int:
    """Bytes of all weights, as they are gathered for a weight sync; 0: no ranks share them."""
    if use.fsdp != FULL:
        return 0
    return use.itemsize * sum(bucket.numel for bucket in shared_buckets(use, tensors))


def unreduced_bytes(use: ModelUse, tensors: StageTensors) -> dict[str, int]:
    """Gradients of a backward pass that wait to be summed over ranks: the most at a time at the HEAD, while each layer computes, from the
    last one on, and at the EMBEDDING. Empty without Megatron-FSDP.

    A bucket is there from its first gradient on. When it has all of them it is sent, after buckets that were sent before have been
    waited for until no more elements than the largest layer's are on their way (`wait_for_previous_grad_reduce` in
    param_and_grad_buffer.py of megatron-core 0.19.2, with the size that `megarl.megatron.fsdp` gives it).
    """
    if use.fsdp is None or not use.trainable:
        return {}
    buckets = shared_buckets(use, tensors)
    of = {tensor.name: number for number, bucket in enumerate(buckets) for tensor in bucket.tensors}
    layers = dict[str, int]()
    for tensor in tensors.weights:
        layer = _layer(tensor.name)
        layers[layer] = layers.get(layer, 0) + tensor.numel * bool(layer)
    # In the order in which their gradients come: the head's, the layers', the embedding's.
    order = [tensor.name for tensor in reversed(tensors.weights)]
    missing = {number: len(bucket.tensors) for number, bucket in enumerate(buckets)}
    there, sent, most = set[int](), list[int](), dict[str, int]()
    if use.head == "lm" and use.config.tie_word_embeddings:  # the head's gradient is the embedding's
        there.add(of[order[-1]])
    layer = HEAD
    for name in order:
        number = of[name]
        there.add(number)
        if layer != HEAD or _layer(name):
            layer = _layer(name)
        size = sum(_elements(buckets[other]) for other in there)
        most[layer] = max(most.get(layer, 0), GRADIENT * size)
        missing[number] -= 1
        if missing[number]:
            continue
        while sum(buckets[other].numel for other in sent) >= max(layers.values()):
            there.discard(sent.pop(0))
        sent.append(number)
    return most


def _elements(bucket: SharedBucket) -> int:
    """Elements of a gathered bucket, in addition to the rank's own part; 0 for a single rank, whose buckets Megatron-FSDP has in place."""
    return bucket.numel if bucket.ranks > 1 else 0


def _layer(name: str) -> str:
    inside = IN_A_LAYER.fullmatch(name)
    return inside[1] if inside else ""
