"""Complete runs of `megarl sft` on plain text and of `megarl rm`, compared with plain loops over Hugging Face's models."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.config.schema.models import MuonConfig, OptimConfig
from megarl.data.loader import TableLoader
from megarl.data.preferences import PreferenceDataset
from megarl.data.sft import SftDataset
from megarl.data.tokenizer import load_tokenizer
from tests.fixtures.runs import steps, succeed
from tests.megatron.muon import PlainMuon

EPS = 1e-4  # Adam's first steps divide by the gradient's size: a larger eps keeps rounding errors small
OPTIM = ("optim.lr=3e-3", "optim.weight_decay=0", f"optim.eps={EPS}")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)


def learn(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def text_run(task, tmp_path_factory):
    """Three epochs of two steps on PP2 x DP2 over split documents; the run ends after five of the six steps, because
    no validation after the first is better by 100."""
    out = tmp_path_factory.mktemp("text")
    rows = pq.read_table(task / "data/sft.parquet").to_pylist()
    documents = [f"{row['extra_info']['question']} {row['extra_info']['answer']}" for row in rows]
    (out / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[:12]))
    pq.write_table(pa.table({"text": [*documents[12:17], "#### 3"]}), out / "val.parquet")
    files = {
        name: SftDataset(
            out / file, load_tokenizer(task / "model"), max_length=8, text_key="text", truncation="split"
        )
        for name, file in (("train", "train.jsonl"), ("val", "val.parquet"))
    }
    batch = len(files["train"]) // 4 * 2
    printed = succeed(
        "sft", f"data.train_files={out}/train.jsonl", f"data.val_files={out}/val.parquet", "data.text_key=text",
        "data.max_length=8", "data.truncation=split", f"data.train_batch_size={batch}", f"model.path={task}/model",
        "max_token_len_per_gpu=64", "megatron.dtype=float32", *OPTIM,
        "megatron.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=4", "trainer.total_epochs=3",
        "trainer.test_freq=1", "trainer.save_best=true", "trainer.early_stop_patience=4",
        "trainer.early_stop_min_delta=100", "trainer.relays_from=4", f"trainer.default_local_dir={out}/run",
    )  # fmt: skip
    return out / "run", printed, files, batch


def mean_loss(model, table):
    total, count = 0.0, 0
    for ids in table["input_ids"].to_pylist():
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        total -= log_probs.gather(1, torch.tensor(ids[1:])[:, None]).sum()
        count += len(ids) - 1
    return total / count


def test_plain_text_follows_transformers_through_epochs(text_run, task):
    """The losses of every step and those of the held-out texts after it; two ranks share an odd number of held-out texts."""
    run, _, files, batch = text_run
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    optimizer, losses, held_out = adamw(model), [], []
    loader = TableLoader(files["train"], batch, True, 1)
    assert len(loader) == 2 and len(files["val"]) % 2 == 1
    for table in [*loader, *loader, *loader][:5]:
        losses.append(learn(model, optimizer, mean_loss(model, table)))
        with torch.no_grad():
            held_out.append(mean_loss(model, files["val"].table).item())
    found = steps(run)
    assert [step["train/loss"] for step in found] == pytest.approx(losses, rel=1e-5)
    assert [step["val/loss"] for step in found] == pytest.approx(held_out, rel=1e-5)


def test_the_run_ended_early_with_its_best_model(text_run):
    run, printed, files, _ = text_run
    held_out = [step["val/loss"] for step in steps(run)]
    assert "step 5: the last 4 validations had no val/loss under" in printed and "split " in printed
    best = json.loads((run / "best/best.json").read_text())
    assert best == {"step": 1 + int(np.argmin(held_out)), "val/loss": min(held_out)}
    model = AutoModelForCausalLM.from_pretrained(run / "best/hf")
    with torch.no_grad():
        assert mean_loss(model, files["val"].table).item() == pytest.approx(min(held_out), rel=1e-5)


@pytest.mark.slow
def test_muon_follows_its_definition(task, tmp_path):
    """Two steps on TP2 x DP2, and a third of a run resumed from there."""
    rows = pq.read_table(task / "data/sft.parquet").to_pylist()[:12]
    texts = [f"{row['extra_info']['question']} {row['extra_info']['answer']}" for row in rows]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run = (
        "sft", f"data.train_files={tmp_path}/train.jsonl", "data.text_key=text", "data.max_length=64", "data.train_batch_size=4",
        f"model.path={task}/model", "max_token_len_per_gpu=128", "megatron.dtype=float32", *OPTIM, "optim.optimizer=muon",
        "optim.muon.ns_dtype=float32", "megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4", "trainer.save_freq=2",
        f"trainer.default_local_dir={tmp_path}/run",
    )  # fmt: skip
    succeed(*run, "trainer.total_training_steps=2")
    succeed(*run, "trainer.total_training_steps=3")
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    optim = OptimConfig(
        lr=3e-3, weight_decay=0.0, eps=EPS, optimizer="muon", muon=MuonConfig(ns_dtype="float32")
    )
    plain, expected = PlainMuon(model, optim), []
    data = SftDataset(
        tmp_path / "train.jsonl", load_tokenizer(task / "model"), max_length=64, text_key="text"
    )
    for table in [*TableLoader(data, 4, True, 1)][:3]:
        model.zero_grad()
        loss = mean_loss(model, table)
        loss.backward()
        plain.step()
        expected.append(loss.item())
    assert [step["train/loss"] for step in steps(tmp_path / "run")] == pytest.approx(expected, rel=3e-5)


@pytest.fixture(scope="module")
def rm_run(task, tmp_path_factory):
    """Four steps on TP2: pairs of right and wrong answers, and rankings of three; rewards are normalised to mean 0 on the demonstrations."""
    out = tmp_path_factory.mktemp("rm")
    rows = pq.read_table(task / "data/train.parquet").to_pylist()[:40]
    pairs, rankings = [], []
    for number, row in enumerate(rows):
        right = row["reward_model"]["ground_truth"]
        answers = [f"#### {right}", f"#### {int(right) + 1}", "none"]
        if number % 2:
            rankings.append({"prompt": row["prompt"], "responses": answers, "ranks": [1, 2, 2 + number % 3]})
        else:
            pairs.append({"prompt": row["prompt"], "chosen": answers[0], "rejected": answers[1]})
    pq.write_table(pa.Table.from_pylist(pairs), out / "pairs.parquet")
    (out / "rankings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rankings))
    (out / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*pairs[:3], *rankings[:2]]))
    printed = succeed(
        "rm", f"data.train_files=[{out}/pairs.parquet, {out}/rankings.jsonl]", f"data.val_files={out}/val.jsonl",
        "data.max_length=64", "data.train_batch_size=10", f"data.normalize_files={task}/data/sft.parquet",
        "data.normalize_response_key=extra_info.answer", "data.normalize_max_samples=9", "data.normalize=mean_std",
        f"model.path={task}/model", "max_token_len_per_gpu=256", "megatron.tensor_model_parallel_size=2",
        "megatron.dtype=float32", "trainer.n_gpus_per_node=2", *OPTIM, "trainer.test_freq=2", "trainer.save_freq=4", "trainer.save_hf=true",
        f"trainer.default_local_dir={out}/run",
    )  # fmt: skip
    dataset = PreferenceDataset(
        [out / "pairs.parquet", out / "rankings.jsonl"], load_tokenizer(task / "model"), max_length=64
    )
    return out, printed, dataset


def rewards_of(model, lists):
    return [model(torch.tensor([ids])).logits[0, 0] for ids in lists]


@pytest.mark.slow
def test_a_reward_model_follows_transformers(rm_run, task):
    out, _, dataset = rm_run
    model = AutoModelForSequenceClassification.from_pretrained(task / "model", num_labels=1)
    with torch.no_grad():
        model.score.weight.zero_()
    optimizer, expected = adamw(model), []
    for batch in TableLoader(dataset, 10, True, 1):
        losses = []
        for row in batch.to_pylist():
            rewards, scores = rewards_of(model, row["input_ids"]), row["scores"]
            pairs = [(a, b) for a in range(len(scores)) for b in range(len(scores)) if scores[a] > scores[b]]
            losses.append(sum(-torch.sigmoid(rewards[a] - rewards[b]).log() for a, b in pairs) / len(pairs))
        expected.append(learn(model, optimizer, sum(losses) / len(losses)))
    found = [step["train/loss"] for step in steps(out / "run")]
    assert found == pytest.approx(expected, rel=1e-5) and found[0] == pytest.approx(np.log(2), rel=1e-6)
    exported = AutoModelForSequenceClassification.from_pretrained(out / "run/hf")
    with torch.no_grad():
        texts = [text for row in dataset.table["input_ids"].to_pylist() for text in row]
        wanted, given = (torch.stack(rewards_of(one.eval(), texts)) for one in (model, exported))
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-4)
    assert given.std() > 1e-3


@pytest.mark.slow
def test_metrics_of_held_out_rankings(rm_run, task):
    out, printed, _ = rm_run
    assert [("val/accuracy" in step) for step in steps(out / "run")] == [False, True, False, True]
    model = AutoModelForSequenceClassification.from_pretrained(out / "run/checkpoints/step-4/hf").eval()
    table = PreferenceDataset(out / "val.jsonl", load_tokenizer(task / "model"), max_length=64).table
    with torch.no_grad():
        rewards = [
            [value.item() for value in rewards_of(model, lists)] for lists in table["input_ids"].to_pylist()
        ]
    differences = [
        own[a] - own[b]
        for own, scores in zip(rewards, table["scores"].to_pylist(), strict=True)
        for a in range(len(own))
        for b in range(len(own))
        if scores[a] > scores[b]
    ]
    last = steps(out / "run")[-1]
    assert last["val/accuracy"] == pytest.approx(np.mean([value > 0 for value in differences]))
    assert last["val/margin"] == pytest.approx(np.mean(differences), abs=1e-5)
    everything = [value for own in rewards for value in own]
    assert last["val/reward_mean"] == pytest.approx(np.mean(everything), abs=1e-5)
    assert last["val/reward_std"] == pytest.approx(np.std(everything), abs=1e-5)
    assert "updates x rankings" in printed


@pytest.mark.slow
def test_rewards_of_the_reference_answers_have_mean_zero(rm_run, task):
    """The first nine demonstrations, as PPO's reward model would score them."""
    out, printed, _ = rm_run
    assert "9 reference answers: mean reward" in printed
    said = json.loads((out / "run/hf/reward_normalization.json").read_text())
    demonstrations = SftDataset(
        task / "data/sft.parquet",
        load_tokenizer(task / "model"),
        max_length=64,
        response_key="extra_info.answer",
    )
    model = AutoModelForSequenceClassification.from_pretrained(out / "run/hf").eval()
    with torch.no_grad():
        rewards = rewards_of(model, demonstrations.table["input_ids"].to_pylist()[:9])
    values = (np.array([value.item() for value in rewards]) - said["mean"]) / said["std"]
    assert values.mean() == pytest.approx(0, abs=1e-3) and values.std() == pytest.approx(1, rel=1e-3)
    assert said["num_answers"] == 9
