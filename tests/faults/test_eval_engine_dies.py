"""An engine of an evaluation is really killed: it comes back, and every problem has the answer that it would have had without that."""

import os
import signal

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic import arithmetic_texts, write_arithmetic
from examples.tiny_model import make_tiny_model
from megarl.config import EvalConfig, load_config, resolve
from megarl.data.trajectories import read_trajectories
from megarl.trainer.loops import evaluate as evaluation
from megarl.trainer.stages.scoring import Rewards
from tests.cluster.processes import titled

NUM_PROBLEMS, SAMPLES = 12, 2


@pytest.mark.slow
def test_in_the_middle_of_the_answers(tmp_path, monkeypatch):
    write_arithmetic(tmp_path / "data", 16, 16, NUM_PROBLEMS, seed=3)
    make_tiny_model(tmp_path / "model", arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    overrides = [
        f"model.path={tmp_path}/model", f"data.val_files={tmp_path}/data/test.parquet", "data.max_samples=null",
        f"trainer.default_local_dir={tmp_path}/run", "trainer.n_gpus_per_node=2", "rollout.num_engines=2",
        "rollout.tensor_model_parallel_size=1", "rollout.max_num_seqs=2", f"rollout.val_kwargs.n={SAMPLES}",
        "rollout.val_kwargs.temperature=0", "data.max_response_length=32",
    ]  # fmt: skip
    config = resolve(load_config(EvalConfig, "recipes/quickstart_eval.yaml", overrides))
    handed, killed = [], []
    submit = Rewards.submit

    def kill_at_first(self, table):
        handed.extend(table["uid"].to_pylist())
        if not killed:
            killed.append(scheduler_of(self.run.restarts.engines.pids[1]))
            os.kill(killed[0], signal.SIGKILL)
        submit(self, table)

    monkeypatch.setattr(Rewards, "submit", kill_at_first)
    scores = evaluation.evaluate(config, None)
    answers = read_trajectories(tmp_path / "run" / "trajectories.parquet")
    uids = answers["uid"].to_pylist()
    assert len(killed) == 1 and len(list((tmp_path / "run" / "logs").glob("rollout-rank1.restart1.log"))) == 1
    assert sorted(handed) == sorted(uids) and len(set(uids)) == NUM_PROBLEMS * SAMPLES == len(uids)
    assert scores["num_problems"] == NUM_PROBLEMS
    different, of = greedy_differences(tmp_path / "model", answers)
    assert different == 0 < of


def scheduler_of(engine: int) -> int:
    """The SGLang scheduler of an engine's process."""
    family = psutil.Process(engine).children(recursive=True)
    (pid,) = titled("sglang::scheduler", family)
    return pid


@torch.no_grad()
def greedy_differences(folder, answers) -> tuple[int, int]:
    """(tokens that are not transformers' own greedy choice, all tokens)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    different, of = 0, 0
    for prompt, response in zip(
        *(answers[f"{name}_ids"].to_pylist() for name in ("prompt", "response")), strict=True
    ):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        different += int((logits.argmax(-1) != torch.tensor(response)).sum())
        of += len(response)
    return different, of
