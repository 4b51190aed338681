"""The Triton kernels of the head, compiled for an H100: `python -m tests.megatron.compiled_head compile` prints
{kernel: numbers about its code} as JSON. It is separate from `interpreted_head`, which imports Megatron.
"""

import re
from typing import Any

from megarl.megatron import fused_head
from tests.kernel_cases import print_cases


def compiled() -> dict[str, dict[str, int]]:
    """For each kernel, compiled for an H100: loads and stores of 16 bytes, bytes of spilled registers, bytes of machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = fused_head.kernels()
    logits = {"logits": "*bf16", "labels": "*i64", "stride": "i32", "start": "i32", "rows": "i32"}
    sizes = {"BLOCK": fused_head.BLOCK, "WITH_ENTROPY": True}
    cases: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        "reduce_logits": (logits, sizes),
        "differentiate_logits": (logits, sizes),
        "combine_ranks": ({"tokens": "i32"}, {"BLOCK": fused_head.TOKENS, "WITH_ENTROPY": True, "RANKS": 8}),
    }
    found = {}
    for name, (types, constants) in cases.items():
        kernel = getattr(kernels, name)
        types = {**dict.fromkeys(kernel.arg_names, "*fp32"), "inverse_temperature": "fp32", **types}
        types = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
        # As in real launches, logits and their rows are aligned to 16 bytes.
        aligned = {
            (number,): [["tt.divisibility", 16]]
            for number, key in enumerate(kernel.arg_names)
            if key in ("logits", "stride", "rows")
        }
        source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
        made = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused_head.WARPS}
        )
        code = made.asm["ptx"]
        found[name] = {
            "wide": len(re.findall(r"\b(?:ld|st)\.global\S*\.v4\.b32|\b(?:ld|st)\.global\S*\.v4\.u32", code)),
            "local": len(re.findall(r"\b(?:ld|st)\.local", code)),
            "bytes": len(made.asm["cubin"]),
        }
    return found


def main() -> None:
    print_cases((), compiled)


if __name__ == "__main__":
    main()
