"""A mixture of experts from a float8 checkpoint, trained over expert parallel ranks."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.data.loader import TableLoader
from megarl.data.sft import SftDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.trainer.run.logger import read_metrics
from tests.fixtures.runs import succeed
from tests.trainer.test_runs import plain_losses
from tests.weight_sync.shards import quantise


def test_deepseek_from_float8_keeps_its_prediction_layer(task, tmp_path):
    """Three steps on TP2 x EP2 give transformers' losses; the export is not quantised and has the MTP layer."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2}
    plain = make_tiny_model(
        tmp_path / "plain", arithmetic_texts(), family="deepseek_v3", num_mtp_layers=1, **sizes
    )
    model = shutil.copytree(plain, tmp_path / "float8")
    means = quantise(model, (16, 16))
    save_file({name: tensor.float() for name, tensor in means.items()}, plain / "model.safetensors")
    succeed(
        "sft", "recipes/quickstart_sft.yaml", f"data.train_files={task}/data/sft.parquet", f"model.path={model}",
        "model.mtp=keep", "data.train_batch_size=16", "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}/run", "trainer.n_gpus_per_node=2",
        "megatron.pipeline_model_parallel_size=1", "megatron.expert_model_parallel_size=2",
        "optim.lr_warmup_steps=0", "optim.lr=1e-3", "optim.weight_decay=0",
    )  # fmt: skip
    data = SftDataset(
        str(task / "data/sft.parquet"),
        load_tokenizer(str(plain)),
        max_length=64,
        response_key="extra_info.answer",
    )
    expected = plain_losses(plain, TableLoader(data, 16, True, 1))
    found = [step["train/loss"] for step in read_metrics(tmp_path / "run")]
    assert found == pytest.approx(expected, rel=1e-5)
    exported = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert exported.keys() == means.keys()
    kept = [name for name in means if name.startswith("model.layers.2.") and name not in repeated(exported)]
    assert len(kept) > 30 and all(torch.equal(exported[name], means[name].float()) for name in kept)
    config = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and "quantization_config" not in config


def repeated(tensors):
    """The tensors of the MTP layer that are copies of the trained model's; the copies are checked."""
    pairs = {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
    }
    assert all(torch.equal(tensors[copy], tensors[original]) for copy, original in pairs.items())
    return pairs
