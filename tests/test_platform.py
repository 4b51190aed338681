"""The CPU/GPU seam: what megatron-core asks of CUDA works on a CPU, and nothing else changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megarl import platform
from tests.ranks import RankPool

ROOT = Path(__file__).parents[1]

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the seam does nothing where CUDA exists")


@pytest.fixture(autouse=True, scope="module")
def seam() -> None:
    platform.install()


def run_python(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_names_of_this_machine() -> None:
    cuda = torch.cuda.is_available()
    assert platform.is_cuda() == cuda
    assert platform.backend() == ("nccl" if cuda else "gloo")
    assert platform.device().type == ("cuda" if cuda else "cpu")
    assert platform.default_dtype() == (torch.bfloat16 if cuda else torch.float32)
    assert platform.resolve_dtype(None) == platform.default_dtype()
    assert platform.resolve_dtype("bfloat16") == torch.bfloat16


@pytest.mark.parametrize("name", ["int64", "bfloat17", "nn"])
def test_a_dtype_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not a floating point dtype"):
        platform.torch_dtype(name)


@without_cuda
def test_installing_again_changes_nothing() -> None:
    before = torch.zeros, torch.Tensor.to, torch.cuda.Stream
    platform.install()
    assert before == (torch.zeros, torch.Tensor.to, torch.cuda.Stream)


@without_cuda
def test_factories_and_moves_that_name_cuda_stay_on_the_cpu() -> None:
    made = [
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=torch.device("cuda", 0), pin_memory=True),
        torch.tensor([1.0], device=torch.cuda.current_device()),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:0"),
        torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
        torch.ones(2).pin_memory(),
        torch.nn.Linear(1, 1).cuda().weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[5].dtype == torch.bfloat16


@without_cuda
def test_other_devices_and_contexts_keep_working() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"


@without_cuda
def test_type_names_equal_both_devices() -> None:
    name = torch.zeros(1).type()
    assert name == "torch.FloatTensor"
    assert name in ["torch.cuda.HalfTensor", "torch.cuda.FloatTensor"]
    assert name != "torch.cuda.HalfTensor"
    assert torch.zeros(1).type(torch.int32).dtype == torch.int32


@without_cuda
def test_the_cuda_generator_is_the_cpus() -> None:
    torch.cuda.manual_seed(11)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(3), first)


@without_cuda
def test_streams_and_events_are_one_timeline() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        event = stream.record_event()
    event.synchronize()
    stream.wait_stream(torch.cuda.current_stream())
    assert event.query()
    assert event.elapsed_time(torch.cuda.Event()) == 0.0
    torch.cuda.synchronize()


@without_cuda
def test_hugging_face_loads_rotary_frequencies(tmp_path: Path) -> None:
    """Under a device context that knew only wrapped factories, the frequencies were uninitialised."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        rope_theta=100.0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).model.rotary_emb.inv_freq
    torch.testing.assert_close(loaded, 100.0 ** (-torch.arange(0, 8, 2) / 8))


@without_cuda
def test_megatron_is_imported_without_compilers_or_warnings() -> None:
    done = run_python(
        "import sys, megarl.megatron, torch, megatron.core.models.gpt\n"
        "print([name for name in sys.modules if name.startswith(('torch._dynamo', 'torch._inductor'))])\n"
        "print(torch.compile.__module__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "torch"]


@without_cuda
def test_megatron_imported_too_early_is_an_error() -> None:
    done = run_python("import sys; sys.modules['megatron.core'] = sys; import megarl.megatron")
    assert done.returncode == 1
    assert "must come before megatron.core" in done.stderr


def _exchange_unequal_parts(rank: int, world: int) -> tuple[list, list]:
    """Rank r has r rows, all r; then every rank adds r + 1 to every row of every rank."""
    gathered = [torch.empty(size, 2) for size in range(world)]
    torch.distributed.all_gather(gathered, torch.full((rank, 2), float(rank)))
    summed = torch.empty(rank, 2)
    torch.distributed.reduce_scatter(summed, [part + rank + 1 for part in gathered])
    return [part.tolist() for part in gathered], summed.tolist()


@without_cuda
def test_collectives_of_unequal_parts(ranks: RankPool) -> None:
    for rank, (gathered, summed) in enumerate(ranks.run(_exchange_unequal_parts, world=3)):
        assert gathered == [[], [[1.0, 1.0]], [[2.0, 2.0]] * 2]
        assert summed == [[3.0 * rank + 1 + 2 + 3] * 2] * rank


def test_fused_functions_are_compiled_once_for_all_numbers_of_tokens() -> None:
    """`torch.compile` taken within the context, as megatron-core takes it, and taken outside; dynamo counts what it hands to its backend."""
    code = """
import torch
from torch._dynamo.testing import CompileCounter
from megarl.platform import compiling_for_any_size

def compilations(decorator):
    counter = CompileCounter()
    function = decorator(lambda y: torch.nn.functional.silu(y[..., :8]) * y[..., 8:], backend=counter)
    for tokens in (5, 7, 64, 33):
        function(torch.ones(tokens, 1, 16))
    return counter.frame_count

with compiling_for_any_size():
    within = torch.compile
print(compilations(within), compilations(torch.compile))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    once, twice = map(int, done.stdout.split())
    assert (once, twice) == (1, 2)
