"""What only a GPU can show: the same code on CUDA and NCCL, with Transformer Engine where it is installed."""

import multiprocessing

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"),
]


def _log_probs(model_path: str, rendezvous: str, table, results) -> None:
    """In a process of its own: log-probs of the table's responses by one rank on NCCL, in bfloat16."""
    from megarl.hybrid_engine import load_hf_weights
    from megarl.layout.grid import ParallelLayout
    from megarl.megatron.build import build_model, local_parameters
    from megarl.megatron.logprobs import lm_head
    from megarl.megatron.packed import unpack
    from megarl.megatron.packing import pack_trajectories
    from megarl.megatron.parallel import init_parallel
    from megarl.megatron.step import forward_only
    from megarl.models import read_model_config

    layout = ParallelLayout(world=1)
    init_parallel(layout, 0, 1, init_method=f"file://{rendezvous}")
    config = read_model_config(model_path)
    chunks = build_model(config, layout, dtype=torch.bfloat16, trainable=False)
    load_hf_weights(model_path, config, layout, 0, local_parameters(chunks))
    batch = pack_trajectories(table, range(table.num_rows))
    (output,) = forward_only(chunks, [batch], lm_head(vocab_size=config.vocab_size))
    results.put(unpack(batch, output[:, 0]))


def test_log_probs_on_a_gpu_are_those_of_transformers(tmp_path):
    import pyarrow as pa
    from transformers import AutoModelForCausalLM

    from tests.hybrid_engine.shards import make_model

    make_model(tmp_path / "model")
    sequences = [([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15]), ([20], [21])]
    table = pa.table(
        {
            "prompt_ids": [prompt for prompt, _ in sequences],
            "response_ids": [response for _, response in sequences],
            "response_mask": [[True] * len(response) for _, response in sequences],
        }
    )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (str(tmp_path / "model"), str(tmp_path / "rendezvous"), table, results)
    process = context.Process(target=_log_probs, args=arguments)
    process.start()
    found = results.get(timeout=120)
    process.join(30)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (prompt, response), log_probs in zip(sequences, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=3e-2, rtol=0)
