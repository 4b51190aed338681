"""Runs the kernel of `float8.dequantise` in Triton's interpreter on a CPU: `python -m tests.models.interpreted_float8` (with TRITON_INTERPRET=1)
prints {case: whether its numbers are torch's} as JSON. It needs a process of its own, since Triton reads the variable when it is imported."""

import json
import sys

import torch

from megarl.models.float8 import FP8, dequantise_all, in_blocks, scale_at_once
from megarl.shadow.device import PACKAGES


def main() -> None:
    sys.path.append(str(PACKAGES))
    import triton

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 has to be set"
    found = {}
    types = (torch.bfloat16, torch.float16, torch.float32)
    for turn, block in enumerate(((128, 128), (16, 32), (6, 10))):
        for place, shape in enumerate(((1, 1), (37, 300), (256, 128), (130, 515))):
            drawn = torch.Generator().manual_seed(shape[1])
            weights = [(torch.randn(shape, generator=drawn) * 100).to(FP8) for _ in range(3)]
            # The least and the largest number, -0 and NaN.
            for values in weights:
                values.view(torch.uint8).view(-1)[:4] = torch.tensor([1, 0x7E, 0x80, 0x7F])[: values.numel()]
            scales = [torch.rand(in_blocks(shape, block), generator=drawn) for _ in weights]
            dtype = types[(turn + place) % len(types)]  # each with all blocks, and with all shapes
            for number in (1, len(weights)):
                several = weights[:number], scales[:number]
                expected = dequantise_all(*several, block, dtype)
                out = torch.empty((number, *shape), dtype=dtype)
                scale_at_once(*several, block, out)
                same = torch.equal(out.nan_to_num(-1), expected.nan_to_num(-1))
                found[f"{number} {block} {shape} {dtype}"] = same
    print(json.dumps(found))


if __name__ == "__main__":
    main()
