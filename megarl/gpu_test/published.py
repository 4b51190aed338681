"""Published figures of single GPUs, and what is found here beside them.

None of them is of megarl, and none was repeated: each is another program's, on a card of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A figure that others published.

    Attributes:
        name: in a few words.
        source: where it stands.
        caveat: why the two are not the same thing.
    """

    name: str
    source: str
    tokens_per_s: float
    seconds: float | None = None
    mfu: float | None = None
    caveat: str = ""


ARTICLE = Published(
    "PPO of Qwen2.5-0.5B, H800",
    "an article on verl, step 42",
    1702.0,
    13.3,
    caveat="1,702 tokens/s for 13.3 s are 22,637 tokens a step, 354 a trajectory; here each trajectory has all 1,024",
)
PRIME_RL = "prime-rl, benchmarks/baselines: the trainer alone"
RL_16K = Published("RL of Qwen3-0.6B, 16,384 tokens, H100", PRIME_RL, 11_900.0, mfu=0.111)
RL_64K = Published("RL of Qwen3-0.6B, 65,536 tokens, H100", PRIME_RL, 10_100.0, mfu=0.268)


def beside(published: Published, tokens_per_s: float, seconds: float, mfu: float | None) -> str:
    """What was found here, and how it compares, as text."""
    parts = [
        f"{tokens_per_s:,.0f} tokens/s, {_ratio(tokens_per_s, published.tokens_per_s)} of {published.tokens_per_s:,.0f}"
    ]
    parts.append(
        f"{seconds:.2f} s a step"
        + (f", {_ratio(seconds, published.seconds)} of {published.seconds}" if published.seconds else "")
    )
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}" + (f" (published: {published.mfu:.1%})" if published.mfu else ""))
    text = "; ".join(parts) + f" ({published.source})"
    return f"{text}; {published.caveat}" if published.caveat else text


def _ratio(found: float, other: float) -> str:
    return f"{found / other:.2f}x"
