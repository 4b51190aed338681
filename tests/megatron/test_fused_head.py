"""The head on a GPU: its kernels, interpreted on a CPU (`interpreted_head`), have torch's results, and compile for an H100."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.fused_head import add_product, chunks_of, given_gradient, gradient_sum
from megarl.models import head_chunk_tokens
from megarl.shadow import device
from tests.megatron.hf import save_model

needs_triton = pytest.mark.skipif(
    not (device.PACKAGES / "triton").is_dir(), reason="Triton is not installed for shadow runs"
)


MODULES = {"interpret": "interpreted_head", "compile": "compiled_head"}


def cases(how: str, folder: Path, *names: str) -> dict[str, Any]:
    """The results of the cases."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environment |= {"TRITON_INTERPRET": "1" if how == "interpret" else "0", "MODEL": str(folder)}
    command = [sys.executable, "-m", f"tests.megatron.{MODULES[how]}", how, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("head")
    save_model(folder, tied=False)
    return cases("interpret", folder)


# Relative to each tensor's largest number. In bfloat16 the interpreter truncates where a GPU rounds: in the last of eight bits, for products twice.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_outputs_and_gradients_are_those_of_torch(found: dict[str, Any], dtype: str) -> None:
    """For one chunk and several, of equal size and not, for incomplete blocks, with and without entropy."""
    assert len(found[dtype]) == (8 if dtype == "float32" else 4)
    for name, (from_whole, from_torch) in found[dtype].items():
        assert from_torch < TOLERANCES[dtype], name
        # Unsharded logits are not rounded to the model's type.
        assert from_whole < TOLERANCES[dtype] * (1 if dtype == "float32" else 4), name


@needs_triton
def test_extreme_logits_stay_finite_and_exact(found: dict[str, Any]) -> None:
    extreme, third = found["extreme"], math.log(3)
    torch.testing.assert_close(
        torch.tensor(extreme["output"]), torch.tensor([[0.0, 0.0], [-2e4, 0.0], [-third, third]])
    )
    assert extreme["finite"] and extreme["largest logit"] > 5000 and extreme["apart"] < 1e-6
    assert found["infinite"] == [True] * 4


@needs_triton
def test_two_ranks_have_the_same_bits_and_whole_gradients(found: dict[str, Any]) -> None:
    """With two shares that have real rows, and with a share that is only padding."""
    assert len(found["ranks_of_two"]) == 2 and max(found["ranks_of_two"]) < 1e-6


@needs_triton
def test_logits_of_the_largest_chunk_are_computed_once(found: dict[str, Any]) -> None:
    """Matrix products of 7 tokens in one, two or three chunks: three per chunk, and a fourth for all chunks but the last."""
    assert found["products"] == {"7": 3, "4": 7, "3": 11}
    assert found["second_pass"] < 1e-6


@needs_triton
def test_logits_exist_once_for_a_chunk_and_never_in_float32(found: dict[str, Any]) -> None:
    """The largest tensor has logits of 5 tokens in bfloat16, with 300 rows aligned to 304; the largest in float32 has 300 rows, of width 2,
    of the gradient buffer."""
    assert found["largest"] == {"any": 5 * 304 * 2, "float32": 300 * 2 * 4}


@needs_triton
def test_gradients_are_added_to_the_buffers(found: dict[str, Any]) -> None:
    weight, embedding = found["gradient_buffers"]["weight"], found["gradient_buffers"]["embedding"]
    assert weight["apart"] < 2**-8 and embedding["apart"] < 2**-8
    assert weight["added"] and embedding["added"]
    assert weight["given"] and not embedding["given"]


@needs_triton
def test_a_model_is_trained_as_with_torch(found: dict[str, Any]) -> None:
    """With Megatron's data parallel gradients, whose buckets are reduced during the pass; tied embeddings get the gradients of both uses."""
    for kind in ("own", "tied"):
        assert found["updates"][kind]["numbers"] < 1e-5
        assert found["updates"][kind]["weights"] < 1e-3  # Adam divides small gradients by their size


@needs_triton
def test_the_compiler_reads_and_writes_logits_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """The compiler may refuse code that the interpreter accepts; and single loads of bfloat16 would be slow."""
    found = cases("compile", tmp_path)
    assert found["reduce_logits"]["wide"] >= 2 and found["differentiate_logits"]["wide"] >= 4
    assert all(kernel["bytes"] > 0 and kernel["local"] == 0 for kernel in found.values())


def test_the_last_chunk_is_as_large_as_any() -> None:
    for tokens in range(30):
        for size in (1, 7, 8, 100):
            chunks = chunks_of(tokens, size)
            assert [token for chunk in chunks for token in range(tokens)[chunk]] == list(range(tokens))
            lengths = [chunk.stop - chunk.start for chunk in chunks]
            assert not lengths or lengths[-1] == max(lengths) == min(size, tokens)


def test_chunks_have_a_gibibyte_of_logits_unless_configured() -> None:
    assert head_chunk_tokens(152064, 2, None) == 3530 and head_chunk_tokens(152064 // 8, 2, None) == 28244
    assert head_chunk_tokens(152064, 4, None) == 1765 and head_chunk_tokens(152064, 2, 7) == 7
    assert head_chunk_tokens(0, 2, None) > 0  # a rank with only padding


def test_a_weight_without_a_buffer_gets_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    total = gradient_sum(weight)
    add_product(total, torch.ones(5, 3, dtype=torch.bfloat16), torch.ones(5, 2, dtype=torch.bfloat16))
    given = given_gradient(weight, total)
    assert given.dtype == torch.bfloat16 and torch.equal(given, torch.full_like(given, 5.0))
    assert not hasattr(weight, "grad_added_to_main_grad")
    # A buffer of another type is not used, since sums are in float32.
    weight.main_grad = torch.zeros(3, 2, dtype=torch.bfloat16)
    assert gradient_sum(weight).dtype == torch.float32
