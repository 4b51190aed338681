"""The tokenizer that a model was trained with comes with it."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from megarl.checkpoints.hf.export import ExportPlan
from megarl.config import SFTConfig, load_config, resolve
from megarl.layout.grid import ParallelLayout
from megarl.models import COMPANIONS, read_model_config
from megarl.trainer.roles.model_roles import supervised_spec
from megarl.trainer.run.export import export_hf
from megarl.trainer.workers.model import write_companions
from tests.weight_sync.shards import load_all, make_model

ONE = ParallelLayout(world=1)


def fine_tuning(folder: Path) -> SFTConfig:
    """A run on the model in `folder`/model, which has a tokenizer, with the one in `folder`/chat."""
    make_model(folder / "model")
    (folder / "chat").mkdir()
    (folder / "model" / "tokenizer.json").write_text(json.dumps({"of": "model"}))
    (folder / "model" / "vocab.json").write_text("{}")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    (folder / "chat" / "tokenizer.json").write_text(json.dumps({"of": "chat"}))
    (folder / "chat" / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "chat" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    keys = [f"model.path={folder}/model", f"model.tokenizer_path={folder}/chat", "data.train_files=a.jsonl"]
    keys += ["data.max_length=8", "data.train_batch_size=1", "optim.lr=1", "max_token_len_per_gpu=8"]
    return resolve(load_config(SFTConfig, None, keys))


def check_tokenizer(folder: Path) -> None:
    assert json.loads((folder / "tokenizer.json").read_text()) == {"of": "chat"}
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (folder / "vocab.json").exists(), "no file of the other tokenizer"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 3}, "the model's"


def test_an_exported_model_has_the_tokenizer_that_it_was_trained_with(tmp_path: Path) -> None:
    config = fine_tuning(tmp_path)
    path = config.model.path
    plan, ranks = ExportPlan(read_model_config(path), ONE, torch.float32), load_all(path, ONE)

    def call(method: str, argument: object) -> list:
        if method == "export_plan":
            return [plan]
        return [plan.pack(argument, rank, tensors) for rank, tensors in enumerate(ranks)]

    run = SimpleNamespace(wait=lambda found: found, status=lambda what: nullcontext(), say=lambda text: None)
    export_hf(run, SimpleNamespace(call=call), config.model, tmp_path / "out")
    check_tokenizer(tmp_path / "out")


def test_a_checkpoint_has_the_tokenizer_that_its_model_is_trained_with(tmp_path: Path) -> None:
    config, checkpoint = fine_tuning(tmp_path), tmp_path / "checkpoint"
    checkpoint.mkdir()
    spec = supervised_spec(config, "lm", 1)
    facts = read_model_config(config.model.path)
    worker = SimpleNamespace(spec=spec, config=facts, dtype=torch.float32, depth=0)
    files = write_companions(worker, checkpoint)
    assert f"{COMPANIONS}/chat_template.jinja" in files
    check_tokenizer(checkpoint / COMPANIONS)
