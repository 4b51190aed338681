"""A real engine on the CPU that drafts tokens by n-grams: against an engine that drafts none, and against Hugging Face."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.tiny_model import make_tiny_model
from megarl.rollout.engine import EngineConfig, EngineCounts, SamplingParams, SpeculationConfig
from tests.rollout.conftest import CONTEXT, TP, Model, make_qwen2
from tests.rollout.invariance import OBSTACLE, needs_compiler, needs_invariance
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import sync_state
from tests.rollout.sglang.test_engine import PROMPTS, UIDS, assert_serves, hf_log_probs
from tests.rollout.sglang.test_interruption import interrupt_often, take_off

pytestmark = needs_compiler

NGRAM = SpeculationConfig("ngram", 4)
# Greedy and sampled, with cuts and without; models with random weights repeat themselves, so that many drafted tokens are right.
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_new_tokens=40),
    SamplingParams(temperature=1.0, max_new_tokens=40, seed=3),
    SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, max_new_tokens=40, seed=5, ignore_eos=True
    ),
)
NUM_DRAWS = 3000
NUM_TOKENS, TEMPERATURE = 12, 0.5


@pytest.fixture(scope="module")
def drafting(model_a: Model, tmp_path_factory) -> Iterator[EngineProcess]:
    """Like `engine`, but with drafted tokens."""
    config = EngineConfig(
        str(model_a.path),
        tensor_parallel_size=TP,
        max_num_seqs=64,
        max_total_tokens=8192,
        enable_memory_saver=True,
        deterministic=OBSTACLE is None,
        speculation=NGRAM,
    )
    process = EngineProcess(config, tmp_path_factory.mktemp("drafting") / "engine.log").start()
    yield process
    process.close()


def bring(engine: EngineProcess, folder: Path, model: Model, version: int) -> None:
    sync_state(engine, folder, model.state, model.hf.config, TP, version)


def answers(engine: EngineProcess, sampling: SamplingParams) -> list[tuple]:
    """The answers to each prompt, requested twice under different uids."""
    uids = [*UIDS, *(f"again/{uid}" for uid in UIDS)]
    found = engine.call("generate", PROMPTS * 2, uids, sampling)
    return [(g.response_ids, g.log_probs, g.finish_reason) for g in found]


@needs_invariance
def test_responses_have_the_bits_that_they_have_without(engine, drafting, sync, model_a, tmp_path) -> None:
    """Whatever was drafted: at the second call the engine has seen every response."""
    sync(model_a, 200)
    bring(drafting, tmp_path, model_a, 200)
    for sampling in SAMPLINGS:
        expected = answers(engine, sampling)
        assert answers(drafting, sampling) == expected
        drafting.call("take_counts")
        assert answers(drafting, sampling) == expected
        found = drafting.call("take_counts")
        assert found.tokens == sum(len(ids) - 1 for ids, *_ in expected)
        assert found.tokens > 1.5 * found.passes, (sampling, found)


def test_greedy_responses_and_log_probs_are_hugging_faces_after_syncs_and_released_memory(
    drafting, model_a, model_b, tmp_path
) -> None:
    bring(drafting, tmp_path / "a", model_a, 210)
    assert_serves(drafting, model_a, 210)
    drafting.call("release_memory", ["weights", "kv_cache"])
    drafting.call("resume_memory", ["weights"])
    bring(drafting, tmp_path / "b", model_b, 211)
    drafting.call("resume_memory", ["kv_cache"])
    assert_serves(drafting, model_b, 211)


def test_sampled_log_probs_are_hugging_faces(drafting, model_a, tmp_path) -> None:
    bring(drafting, tmp_path, model_a, 220)
    for temperature in (1.0, 0.3):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=30, seed=2, ignore_eos=True)
        for prompt, generation in zip(
            PROMPTS, drafting.call("generate", PROMPTS, UIDS, sampling), strict=True
        ):
            expected = hf_log_probs(model_a, prompt, generation.response_ids, temperature)
            assert generation.log_probs == pytest.approx(expected, abs=1e-4)


@needs_invariance
def test_interrupted_responses_are_those_that_were_left_alone(drafting, model_a, tmp_path) -> None:
    bring(drafting, tmp_path, model_a, 230)
    prompts, uids = [ids[:20] for ids in PROMPTS] * 4, [f"p{row}/0" for row in range(4 * len(PROMPTS))]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=100, seed=3)
    whole = {g.uid: g for g in drafting.call("generate", prompts, uids, sampling)}
    drafting.call(take_off, prompts, uids, sampling)
    found, open_ones = drafting.call(interrupt_often, 0.03)
    assert any(open_ones), open_ones
    assert {g.uid: (g.response_ids, g.log_probs, g.finish_reason) for g in found} == {
        uid: (g.response_ids, g.log_probs, g.finish_reason) for uid, g in whole.items()
    }


def test_responses_reach_as_near_to_the_end_of_the_context(engine, drafting, sync, model_a, tmp_path) -> None:
    """Tokens are drafted beyond the end of the context."""
    sync(model_a, 240)
    bring(drafting, tmp_path, model_a, 240)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=CONTEXT - 20, ignore_eos=True)
    (alone,), (generation,) = (
        one.call("generate", [[11] * 20], ["p/0"], sampling) for one in (engine, drafting)
    )
    assert (
        generation.response_ids == alone.response_ids
        and len(alone.response_ids) > CONTEXT - 20 - NGRAM.num_draft_tokens
    )
    expected = hf_log_probs(model_a, [11] * 20, generation.response_ids)
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)


def test_penalties_are_refused(drafting, model_a, tmp_path) -> None:
    bring(drafting, tmp_path, model_a, 250)
    sampling = SamplingParams(repetition_penalty=1.1, max_new_tokens=4)
    with pytest.raises(ValueError, match="p/0: penalties and drafted tokens"):
        drafting.call("generate", [[1, 2]], ["p/0"], sampling)


@needs_invariance
@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("deepseek_v3", 0.7),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("glm4_moe", 0.7), ("gpt_oss", 0.05))),
    ],
)
def test_latent_attention_and_experts_give_the_same_bits(tmp_path, family: str, temperature: float) -> None:
    """Sampled at temperatures at which these models repeat themselves."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 3, "num_attention_heads": 4}
    make_tiny_model(tmp_path / "model", ["two words"], family=family, **sizes)
    prompts = [[4, 5, 6, 7 + row % 4] * (1 + row % 5) for row in range(12)]
    sampling = SamplingParams(temperature=temperature, max_new_tokens=40, seed=3, ignore_eos=True)
    found = []
    for number, speculation in enumerate((None, NGRAM)):
        config = EngineConfig(
            str(tmp_path / "model"),
            load_format="auto",
            max_total_tokens=4096,
            deterministic=True,
            speculation=speculation,
        )
        engine = EngineProcess(config, tmp_path / f"{number}.log").start()
        try:
            answers = engine.call("generate", prompts, [f"p{row}/0" for row in range(12)], sampling)
            drafted = engine.call("take_counts")
        finally:
            engine.close()
        found.append([(g.response_ids, g.log_probs) for g in answers])
    assert found[0] == found[1] and drafted.tokens > drafted.passes > 0


@pytest.fixture(scope="module")
def few_tokens(tmp_path_factory) -> Model:
    return make_qwen2(
        tmp_path_factory.mktemp("few-tokens"), seed=5, vocab_size=NUM_TOKENS, initializer_range=0.4
    )


def test_sampled_tokens_are_distributed_as_the_models(few_tokens, tmp_path) -> None:
    """Against the exact distribution of the first three tokens, from Hugging Face's model: many draws, some of which were drafted, in an engine
    that serves a folder and whose cache is so small that some requests have to wait or begin anew."""
    prompt, length = [2, 3, 4, 2, 3, 4], 3
    paths = list(itertools.product(range(NUM_TOKENS), repeat=length - 1))
    with torch.no_grad():
        logits = few_tokens.hf(torch.tensor([[*prompt, *path] for path in paths])).logits / TEMPERATURE
    log_probs = (
        logits[:, len(prompt) - 1 :].double().log_softmax(-1).view(*[NUM_TOKENS] * 2, length, NUM_TOKENS)
    )
    first = log_probs[0, 0, 0]
    joint = first[:, None, None] + log_probs[:, 0, 1][:, :, None] + log_probs[:, :, 2]
    assert joint.exp().sum() == pytest.approx(1.0)

    config = EngineConfig(
        str(few_tokens.path), load_format="auto", max_num_seqs=64, max_total_tokens=1024, speculation=NGRAM
    )
    engine = EngineProcess(config, tmp_path / "engine.log").start()
    try:
        sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=length, seed=9, ignore_eos=True)
        uids = [f"p/{row}" for row in range(NUM_DRAWS)]
        found = engine.call("generate", [prompt] * NUM_DRAWS, uids, sampling)
        drafted = engine.call("take_counts")
    finally:
        engine.close()
    assert drafted.tokens == 2 * NUM_DRAWS and drafted.tokens > 1.1 * drafted.passes, drafted
    counts = Counter(tuple(g.response_ids) for g in found)
    expected = {
        path: NUM_DRAWS * joint[path].exp().item()
        for path in itertools.product(range(NUM_TOKENS), repeat=length)
    }
    often = {path: number for path, number in expected.items() if number >= 5}
    rest = NUM_DRAWS - sum(often.values())
    cells = [(counts[path], number) for path, number in often.items()]
    cells.append((NUM_DRAWS - sum(counts[path] for path in often), rest))
    # chi-squared with len(cells) - 1 degrees of freedom, five standard deviations of slack
    chi = sum((seen - number) ** 2 / number for seen, number in cells)
    assert len(cells) > 20
    assert chi < len(cells) - 1 + 5 * (2 * (len(cells) - 1)) ** 0.5
    for generation in found[:100]:
        path = generation.response_ids
        at = [first[path[0]], log_probs[path[0], 0, 1, path[1]], log_probs[path[0], path[1], 2, path[2]]]
        assert generation.log_probs == pytest.approx([float(value) for value in at], abs=1e-4)


def test_what_was_drafted_is_counted() -> None:
    counted = EngineCounts()
    told = {"prompt_tokens": 10, "cached_tokens": 6}
    counted.count({"meta_info": {"spec_verify_ct": 3, **told}, "output_ids": [1] * 9})
    counted.count({"meta_info": told, "output_ids": [1]})  # only the token of the prompt's prefill
    counted.count({"meta_info": {}, "output_ids": []})  # aborted while it waited for a place
    assert counted == EngineCounts(20, 12, passes=3, tokens=8)
    found = (counted + EngineCounts(20, 0, 1, 4)).metrics()
    assert found == {"perf/prefix_hits": 0.3, "rollout/accept_length": 3.0}
    assert EngineCounts().metrics() == {}


def checked(engine, tokens, positions, drawn):
    """The result of `draw_and_check` for a batch whose draws are `drawn`; runs in the engine's process, where SGLang is imported."""
    from types import SimpleNamespace

    from sglang.srt.layers import sampler

    from megarl.rollout.sglang import speculation

    requests, number = tokens.shape
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    asked = []

    def sample(logits_output, info, *args):
        asked.append({name: getattr(info, name).tolist() for name in names})
        assert torch.equal(args[-1], positions.flatten())
        logits_output.next_token_logprobs = -torch.arange(1.0, requests * number + 1)
        return drawn.flatten()

    verify = SimpleNamespace(
        draft_token_num=number,
        max_tree_depth=number,
        draft_token=tokens.flatten(),
        positions=positions.flatten(),
    )
    info = SimpleNamespace(**{name: torch.arange(requests) for name in names})
    batch = SimpleNamespace(seq_lens=torch.zeros(requests), sampling_info=info, return_logprob=True)
    output, made = SimpleNamespace(), sampler.create_sampler
    sampler.create_sampler = lambda: sample
    try:
        predicted, accepted, path = speculation.draw_and_check(verify, batch, output, None)
    finally:
        sampler.create_sampler = made
    speculation.pick_log_probs(batch, output, predicted, accept_index=path)
    rows = [row for row in range(requests) for _ in range(number)]
    assert asked == [dict.fromkeys(names, rows)]
    return predicted, accepted, path, output.next_token_logprobs


def test_drafted_tokens_are_accepted_up_to_the_first_that_was_not_drawn(engine) -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 0, 0], [5, 0, 0, 0], [5, 6, 7, 8]])
    positions = 20 + torch.arange(4).repeat(5, 1)
    # The padding of shorter drafts has the position after the newest token, wherever it stands.
    positions[2] = torch.tensor([20, 21, 21, 21])
    positions[3] = torch.tensor([20, 21, 21, 21])
    drawn = torch.tensor([[6, 7, 8, 9], [6, 1, 8, 9], [6, 0, 0, 0], [0, 0, 0, 0], [2, 7, 8, 9]])
    predicted, accepted, path, log_probs = engine.call(checked, tokens, positions, drawn)
    assert accepted.tolist() == [4, 2, 2, 2, 1]
    expected = [[0, 1, 2, 3], [4, 5, -1, -1], [8, 9, -1, -1], [12, 13, -1, -1], [16, -1, -1, -1]]
    assert path.tolist() == expected and predicted.tolist() == drawn.flatten().tolist()
    for row, numbers in zip(log_probs, path, strict=True):
        kept = numbers[numbers >= 0]
        assert torch.equal(row[: len(kept)], -(kept + 1.0))
