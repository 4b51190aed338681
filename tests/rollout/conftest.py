"""Tiny models, and the engine that the tests of this room share."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megarl.rollout.engine import EngineConfig, NoValidWeightsError, SamplingParams
from tests.rollout.invariance import OBSTACLE
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import sync_state

TP = 2
CONTEXT = 128
EOS, OTHER_EOS = 1, 7  # config.json names the first, generation_config.json both


@dataclasses.dataclass
class Model:
    """A Hugging Face model and the folder of its configs."""

    path: Path
    hf: torch.nn.Module

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().float() for name, value in self.hf.state_dict().items()}


def make_qwen2(folder: Path, seed: int, **changes) -> Model:
    """Sizes with all of SGLang's special cases at TP2: a padded vocabulary, an MLP of no multiple of 32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 330,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**(sizes | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # default values would hide mixed-up parameters
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.generation_config.eos_token_id = [EOS, OTHER_EOS]
    model.save_pretrained(folder)
    return Model(folder, model)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory) -> Model:
    return make_qwen2(tmp_path_factory.mktemp("qwen2-a"), seed=1)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory) -> Model:
    return make_qwen2(tmp_path_factory.mktemp("qwen2-b"), seed=2)


def refuses_before_a_sync(process: EngineProcess) -> None:
    """Called where the engine is started, because any later test that shares the engine may sync weights into it."""
    assert process.call("weight_version") is None
    with pytest.raises(NoValidWeightsError, match="before a sync"):
        process.call("generate", [[1, 2]], ["a"], SamplingParams(temperature=0.0, max_new_tokens=2))


@pytest.fixture(scope="package")
def engine(model_a, tmp_path_factory) -> Iterator[EngineProcess]:
    """A TP2 engine that was started with dummy weights and refuses to serve them."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    config = EngineConfig(
        str(model_a.path),
        tensor_parallel_size=TP,
        max_num_seqs=64,
        max_total_tokens=8192,
        enable_memory_saver=True,
        deterministic=OBSTACLE is None,
    )
    process = EngineProcess(config, log).start()
    refuses_before_a_sync(process)
    yield process
    process.close()


@pytest.fixture(scope="package")
def sync(engine, tmp_path_factory) -> Callable[..., object]:
    """sync(model, version) -> SyncReport: bring a model's weights into the shared engine."""

    def run(model: Model, version: int):
        folder = tmp_path_factory.mktemp(f"v{version}")
        return sync_state(engine, folder, model.state, model.hf.config, TP, version)

    return run
