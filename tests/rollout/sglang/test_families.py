"""Every family in a real SGLang engine on the CPU, in float32, against Hugging Face's own model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from examples.tiny_model import make_tiny_model
from megarl.models import SGLangPlace, read_model_config, sglang_padding, sglang_pieces
from megarl.models.config import QWEN_HYBRIDS
from megarl.rollout.engine import EngineConfig, SamplingParams
from tests.fixtures.indexers import CHOOSING, choose_alike
from tests.fixtures.tiny_models import MTP_FAMILIES, as_type
from tests.rollout.invariance import OBSTACLE, needs_invariance
from tests.rollout.manifests import rank_slices
from tests.rollout.planned import assert_as_planned
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import sync_state
from tests.rollout.sglang.test_determinism import assert_alone_as_together
from tests.rollout.sglang.test_interruption import interrupt_often, take_off
from tests.routing import experts_of
from tests.weight_sync.fusions import single_experts

TP, NUM_TOKENS = 2, 12
EXPERT_PARALLEL = {
    "mistral": 1,  # a type that megarl has no family for
    "qwen3": 1,
    "qwen3_moe": 2,
    "qwen3_next": 2,
    "qwen3_5": 1,
    "qwen3_5_moe": 2,
    "qwen3_5 with vision": 1,
    "qwen3_5_moe with vision": 2,
    "deepseek_v3": 2,
    "deepseek_v32": 2,
    "glm4_moe": 2,
    "glm4_moe_lite": 2,
    "glm_moe_dsa": 2,
    "minimax_m2": 2,
    "gpt_oss": 1,  # SGLang cannot load its files at a larger size; tests/trainer/test_families.py has two
}
SPARSE = ("deepseek_v32", "glm_moe_dsa")
DENSE = ("mistral", "qwen3", "qwen3_5", "qwen3_5 with vision")
ALWAYS = (
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v3",
)  # every kind of layer of the other families is in one of these, too
ALONE = (
    "qwen3_next",
    "deepseek_v3",
)  # recurrent layers and latent attention; test_determinism.py has plain attention
PROMPTS = [[5, 6, 7], [9, 8, 20, 30, 40, 50], [329, 328, 200], [11] * 20, [100, 150, 191, 192, 193]]
UIDS = [f"p{index}" for index in range(len(PROMPTS))]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class Family:
    name: str
    folder: Path
    engine: EngineProcess


def make_model(folder: Path, family: str, seed: int) -> Path:
    """Sizes with SGLang's special cases at TP2: a padded vocabulary, widths of no multiple of 32."""
    if family == "mistral":
        return as_type(make_model(folder, "llama", seed), "mistral", "MistralForCausalLM")
    family, _, vision = family.partition(" with ")
    return make_tiny_model(
        folder,
        ["some text"],
        family=family,
        vision=bool(vision),
        vocab_size=330,
        hidden_size=64,
        num_layers=4 if family in QWEN_HYBRIDS else 3,  # their fourth layer is the first one with attention
        ffn_hidden_size=80,
        max_position_embeddings=128,
        seed=seed,
        num_mtp_layers=1 if family in MTP_FAMILIES and family != "qwen3_next" else 0,
        fields={"initializer_range": 0.2, **(CHOOSING if family in SPARSE else {})},
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in EXPERT_PARALLEL],
)
def family(request, tmp_path_factory) -> Iterator[Family]:
    """A model in an engine that SGLang loaded from its files."""
    folder = make_model(tmp_path_factory.mktemp(request.param) / "model", request.param, seed=1)
    config = EngineConfig(
        str(folder),
        tensor_parallel_size=TP,
        expert_parallel_size=EXPERT_PARALLEL[request.param],
        load_format="auto",
        max_num_seqs=8,
        max_total_tokens=256,
        enable_memory_saver=True,
        deterministic=OBSTACLE is None,
        return_routed_experts=request.param not in DENSE,
    )
    engine = EngineProcess(config, folder.parent / "engine.log").start()
    yield Family(request.param, folder, engine)
    engine.close()


def config_of(folder: Path) -> PretrainedConfig:
    """The configuration of the language model."""
    return AutoConfig.from_pretrained(folder).get_text_config()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model's file, except for the tensors of its MTP layer, which no engine holds."""
    layers = config_of(folder).num_hidden_layers
    tensors = single_experts(load_file(folder / "model.safetensors"))
    return {
        name: value
        for name, value in tensors.items()
        if not name.startswith((f"model.layers.{layers}.", "mtp."))
    }


def model_of(folder: Path) -> PreTrainedModel:
    return choose_alike(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@torch.no_grad()
def assert_serves(engine: EngineProcess, folder: Path) -> None:
    """The engine's greedy responses and their log-probs equal Hugging Face's with the folder's weights."""
    model = model_of(folder)
    for prompt, answer in zip(PROMPTS, engine.call("generate", PROMPTS, UIDS, GREEDY), strict=True):
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(answer.response_ids) == tokens[len(prompt) :]
        log_probs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)[len(prompt) - 1 : -1]
        expected = log_probs.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0].tolist()
        assert answer.log_probs == pytest.approx(expected, abs=1e-4)


def test_answers_as_hugging_face(family):
    assert_serves(family.engine, family.folder)


def test_experts_are_those_of_hugging_face(family):
    """The experts of every token but the last, also of the tokens that the engine's cache has from an earlier request."""
    if family.name in DENSE:
        pytest.skip("the model has no experts")
    model = model_of(family.folder)
    prompts = [[*prompt, *PROMPTS[3]] for prompt in PROMPTS]
    for _ in range(2):
        for prompt, answer in zip(
            prompts, family.engine.call("generate", prompts, UIDS, GREEDY), strict=True
        ):
            expected = experts_of(model, [*prompt, *answer.response_ids])[:-1]
            assert answer.routed_experts.dtype == np.uint8
            assert np.array_equal(np.sort(answer.routed_experts, -1), expected)
    unasked = replace(GREEDY, return_experts=False)
    answers = family.engine.call("generate", prompts, UIDS, unasked)
    assert all(answer.routed_experts is None for answer in answers)


def test_experts_of_responses_that_were_interrupted(family):
    """Responses are interrupted in the middle of their prompts and of their own tokens, and go on with the same weights."""
    if family.name in DENSE:
        pytest.skip("the model has no experts")
    model = model_of(family.folder)
    sampling = replace(GREEDY, max_new_tokens=30)
    family.engine.call(take_off, PROMPTS, UIDS, sampling)
    found, open_ones = family.engine.call(interrupt_often, 0.03)
    # The engine still has the weights that it loaded from files: only its cache was released.
    assert any(open_ones) and len(found) == len(PROMPTS)
    for answer in found:
        expected = experts_of(model, [*PROMPTS[UIDS.index(answer.uid)], *answer.response_ids])[:-1]
        assert np.array_equal(np.sort(answer.routed_experts, -1), expected)


def test_memory_is_as_planned(family):
    assert_as_planned(family.engine)


@needs_invariance
def test_a_response_has_the_same_bits_in_any_company(family, request):
    """Also when the cache is too small for all requests, so that SGLang retracts some and computes them again."""
    if family.name not in ALONE and not request.config.getoption("--slow"):
        pytest.skip("takes most of a minute: runs with --slow")
    assert_alone_as_together(family.engine, [*PROMPTS, *PROMPTS[:3]], num_tokens=45, step=4)


def test_serves_other_weights_after_a_sync(family, tmp_path):
    """Tensors that SGLang derives from its weights, such as DeepSeek's absorbed projections, are renewed with the weights."""
    other = make_model(tmp_path / "model", family.name, seed=2)
    config = config_of(other)
    sync_state(
        family.engine, tmp_path, weights(other), config, TP, version=1, ep=EXPERT_PARALLEL[family.name]
    )
    assert_serves(family.engine, other)


def test_serves_after_its_memory_was_away(family, tmp_path):
    """Tensors that are no weights come back with the memory (rope caches) or are derived from the weights anew."""
    other = make_model(tmp_path / "model", family.name, seed=3)
    family.engine.call("release_memory", ["kv_cache", "weights"])
    family.engine.call("resume_memory", ["weights"])
    config = config_of(other)
    sync_state(
        family.engine, tmp_path, weights(other), config, TP, version=2, ep=EXPERT_PARALLEL[family.name]
    )
    family.engine.call("resume_memory", ["kv_cache"])
    assert_serves(family.engine, other)


@pytest.mark.parametrize("name", EXPERT_PARALLEL)
def test_the_weight_tables_know_what_the_engine_holds(name, tmp_path):
    """The layout that the tests above proved in a real engine, at more sizes, against `megarl.models`."""
    folder = make_model(tmp_path, name, seed=1)
    state, config = weights(folder), config_of(folder)
    layouts = [(1, 1), (2, 1), (4, 1)] + [(2, 2), (4, 2), (4, 4)] * (name not in DENSE)
    for tp, ep in layouts:
        for rank in range(tp):
            slices, place = rank_slices(state, config, tp, rank, ep), SGLangPlace(tp, rank, ep)
            expected = {
                (tensor, local, tuple(start), tuple(value.shape))
                for tensor, local, start, value in slices.entries
            }
            pieces = sglang_pieces(read_model_config(str(folder)), place)
            found = {(p.tensor, p.local, p.local_box.start, p.local_box.size) for p in pieces}
            assert found == expected
            padding = {local: count for local, count in slices.padding.items() if count}
            assert sglang_padding(read_model_config(str(folder)), place) == padding
