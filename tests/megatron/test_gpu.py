"""Tests that need a GPU: the same code on CUDA and NCCL, with Transformer Engine if it is installed."""

import multiprocessing

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"),
]


SECONDS = 240  # a rank's first imports, and kernels that are compiled for the first time


def _log_probs(model_path: str, rendezvous: str, table, results, rank: int, world: int) -> None:
    """Runs in a process of its own: log-probs of the table's responses from one tensor parallel rank on NCCL, in bfloat16."""
    from megarl.checkpoints.hf.load import load_hf_weights
    from megarl.layout.grid import ParallelLayout
    from megarl.megatron.build import build_model, local_parameters
    from megarl.megatron.heads.outputs import lm_head
    from megarl.megatron.packing import arrange_trajectories, unpack
    from megarl.megatron.parallel import init_parallel
    from megarl.megatron.step import forward_only
    from megarl.models import read_model_config

    torch.cuda.set_device(rank)
    layout = ParallelLayout(world=world, tp=world)
    init_parallel(layout, rank, world, init_method=f"file://{rendezvous}", timeout_s=SECONDS)
    config = read_model_config(model_path)
    chunks = build_model(config, layout, dtype=torch.bfloat16, trainable=False)
    load_hf_weights(model_path, config, layout, rank, local_parameters(chunks))
    batch = arrange_trajectories(table, range(table.num_rows)).on_device()
    (output,) = forward_only(chunks, [batch], lm_head(vocab_size=config.vocab_size))
    results.put((rank, unpack(batch, output[:, 0])))


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("world", [1, 2])
def test_log_probs_on_gpus_are_those_of_transformers(tmp_path, world):
    """With one rank, and with two ranks that share each matrix."""
    import pyarrow as pa
    from transformers import LlamaConfig, LlamaForCausalLM

    # Heads have 64 dimensions: attention kernels do not support the heads of the other tests' models.
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=300, max_position_embeddings=128)
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(tmp_path / "model")
    sequences = [([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15]), ([20], [21])]
    table = pa.table(
        {
            "prompt_ids": [prompt for prompt, _ in sequences],
            "response_ids": [response for _, response in sequences],
            "response_mask": [[True] * len(response) for _, response in sequences],
        }
    )
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, this machine has {torch.cuda.device_count()}")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (str(tmp_path / "model"), str(tmp_path / "rendezvous"), table, results)
    processes = [
        context.Process(target=_log_probs, args=(*arguments, rank, world), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=SECONDS) for _ in processes)
    for process in processes:
        process.join(30)
    for number, (prompt, response) in enumerate(sequences):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        for rank in range(world):
            torch.testing.assert_close(torch.tensor(found[rank][number]), expected, atol=3e-2, rtol=0)
