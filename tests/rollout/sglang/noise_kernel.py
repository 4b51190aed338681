"""A kernel that stores the two kinds of noise of many hashes; imports Triton."""

import triton
import triton.language as tl

from megarl.rollout.sglang.sampling_kernels import exact_noise, rough_noise


@triton.jit
def noises(hashes: tl.tensor, rough: tl.tensor, exact: tl.tensor, SIZE: tl.constexpr) -> None:
    lane = tl.arange(0, SIZE)
    hash_ = tl.load(hashes + lane).to(tl.uint32)
    tl.store(rough + lane, rough_noise(hash_))
    tl.store(exact + lane, exact_noise(hash_))
