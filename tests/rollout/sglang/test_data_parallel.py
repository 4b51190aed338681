"""Data parallel attention in a real SGLang engine on the CPU, against Hugging Face's own model and slices written down by hand."""

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from examples.tiny_model import make_tiny_model
from megarl.cluster.hosts import reserve_port
from megarl.models import SGLangPlace, read_model_config, sglang_padding, sglang_pieces
from megarl.rollout.engine import EngineConfig, NoValidWeightsError, SamplingParams
from megarl.rollout.sglang import engine as engine_module
from tests.rollout.invariance import OBSTACLE, needs_invariance
from tests.rollout.manifests import Slices, rank_slices
from tests.rollout.planned import assert_as_planned
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import sync_slices
from tests.rollout.sglang.test_determinism import assert_alone_as_together
from tests.rollout.sglang.test_families import GREEDY, PROMPTS, UIDS, assert_serves, make_model, weights
from tests.rollout.sglang.test_interruption import interrupt_often, take_off
from tests.routing import experts_of

FEW_SECONDS = 20


@dataclass(frozen=True)
class Layout:
    family: str
    tp: int
    dp: int
    ep: int
    head: bool


# Latent attention, with one rank in each group; then heads sharded within groups of two ranks, with experts sharded over both groups.
LAYOUTS = [
    Layout("deepseek_v3", 2, 2, 2, head=True),
    Layout("glm_moe_dsa", 2, 2, 2, head=True),
    Layout("qwen3_moe", 4, 2, 2, head=False),
    Layout("gpt_oss", 4, 2, 1, head=False),
]


@dataclass
class Served:
    layout: Layout
    folder: Path
    engine: EngineProcess

    def slices(self, folder: Path) -> list[Slices]:
        """Each rank's slices of another model's files."""
        at, config = self.layout, AutoConfig.from_pretrained(folder)
        return [
            rank_slices(weights(folder), config, at.tp, rank, at.ep, at.dp, at.head) for rank in range(at.tp)
        ]


@pytest.fixture(
    scope="module",
    params=[
        # glm_moe_dsa has indexers and latent attention, deepseek_v3 only latent attention.
        pytest.param(
            layout, marks=() if layout.family == "glm_moe_dsa" else pytest.mark.slow, id=layout.family
        )
        for layout in LAYOUTS
    ],
)
def served(request, tmp_path_factory) -> Iterator[Served]:
    """A model in an engine that SGLang loaded from its files."""
    layout = request.param
    folder = make_model(tmp_path_factory.mktemp(layout.family) / "model", layout.family, seed=1)
    config = EngineConfig(
        str(folder),
        tensor_parallel_size=layout.tp,
        expert_parallel_size=layout.ep,
        attention_data_parallel_size=layout.dp,
        data_parallel_lm_head=layout.head,
        load_format="auto",
        max_num_seqs=8,
        max_total_tokens=512,
        enable_memory_saver=True,
        deterministic=OBSTACLE is None,
        return_routed_experts=True,
    )
    engine = EngineProcess(config, folder.parent / "engine.log").start()
    yield Served(layout, folder, engine)
    engine.close()


def groups_of(engine, prompts, uids, sampling) -> dict[str, int]:
    """The group of each request, as reported by the SGLang scheduler that answered it. Runs in the engine's process."""
    asked, found = engine_module.ask, {}

    async def ask(manager, ids, sampling, uid, *more):
        answer = await asked(manager, ids, sampling, uid, *more)
        found[uid] = answer["meta_info"]["dp_rank"]
        return answer

    engine_module.ask = ask
    try:
        engine.generate(prompts, uids, sampling)
    finally:
        engine_module.ask = asked
    return found


def test_answers_as_hugging_face(served: Served) -> None:
    assert_serves(served.engine, served.folder)


def test_samples_of_a_prompt_are_answered_by_one_group_and_all_groups_answer(served: Served) -> None:
    prompts = [PROMPTS[number // 3] for number in range(12)]
    uids = [f"s{number // 3}/{number % 3}" for number in range(12)]
    found = served.engine.call(groups_of, prompts, uids, GREEDY)
    assert [found[uid] for uid in uids] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3


def test_a_single_request_leaves_the_other_groups_idle(served: Served) -> None:
    (alone,) = served.engine.call("generate", PROMPTS[1:2], UIDS[1:2], GREEDY)
    together = served.engine.call("generate", PROMPTS, UIDS, GREEDY)
    assert alone.response_ids == together[1].response_ids


def test_experts_are_those_of_hugging_face(served: Served) -> None:
    """Also for interrupted responses: each group captures the experts of its own tokens, among all groups' tokens."""
    model = AutoModelForCausalLM.from_pretrained(served.folder)
    served.engine.call(take_off, PROMPTS, UIDS, replace(GREEDY, max_new_tokens=40))
    found, open_ones = served.engine.call(interrupt_often, 0.05)
    assert any(open_ones) and len(found) == len(PROMPTS)
    for answer in found:
        expected = experts_of(model, [*PROMPTS[UIDS.index(answer.uid)], *answer.response_ids])[:-1]
        assert np.array_equal(np.sort(answer.routed_experts, -1), expected)


def test_memory_is_as_planned(served: Served) -> None:
    assert_as_planned(served.engine)


def test_an_engine_has_room_for_the_tokens_of_all_groups(served: Served) -> None:
    capacity = served.engine.call("capacity")
    assert (capacity.requests, capacity.tokens) == (8, 512)


@needs_invariance
def test_a_response_has_the_same_bits_in_any_company(served: Served) -> None:
    """Also when a group's cache is too small for its requests, so that SGLang retracts some and computes them again."""
    assert_alone_as_together(served.engine, [*PROMPTS, *PROMPTS[:3]] * 2, num_tokens=45, step=4)


def test_each_rank_takes_its_slices_and_serves_them(served: Served, tmp_path: Path) -> None:
    other = make_model(tmp_path / "model", served.layout.family, seed=2)
    slices = served.slices(other)
    report = sync_slices(served.engine, tmp_path, slices, version=1)
    expected = [4 * sum(value.numel() for *_, value in rank.entries) for rank in slices]
    assert list(report.bytes_written) == expected
    assert_serves(served.engine, other)


def test_serves_after_its_memory_was_away(served: Served, tmp_path: Path) -> None:
    other = make_model(tmp_path / "model", served.layout.family, seed=3)
    held = served.engine.call("memory")
    served.engine.call("release_memory", ["kv_cache", "weights"])
    assert all(rank["kv_cache"] == 0 for rank in served.engine.call("memory"))
    served.engine.call("resume_memory", ["weights"])
    sync_slices(served.engine, tmp_path, served.slices(other), version=2)
    served.engine.call("resume_memory", ["kv_cache"])
    assert [rank["kv_cache"] for rank in served.engine.call("memory")] == [rank["kv_cache"] for rank in held]
    assert_serves(served.engine, other)


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "gpt_oss"]
)
def test_the_weight_tables_know_what_the_groups_hold(family: str, tmp_path: Path) -> None:
    """The layout that the tests above proved in real engines, at more sizes, against `megarl.models`."""
    folder = make_model(tmp_path, family, seed=1)
    state, config, model = weights(folder), AutoConfig.from_pretrained(folder), read_model_config(str(folder))
    for tp, dp, ep in [(2, 2, 1), (4, 2, 1), (4, 4, 1)] + [(4, 2, 2), (4, 4, 4)] * (family != "qwen3"):
        for rank, head in itertools.product(range(tp), (False, True)):
            slices = rank_slices(state, config, tp, rank, ep, dp, head)
            place = SGLangPlace(tp, rank, ep, dp, dp_head=head)
            expected = {
                (tensor, local, tuple(start), tuple(value.shape))
                for tensor, local, start, value in slices.entries
            }
            pieces = sglang_pieces(model, place)
            assert {(p.tensor, p.local, p.local_box.start, p.local_box.size) for p in pieces} == expected
            padding = {local: count for local, count in slices.padding.items() if count}
            assert sglang_padding(model, place) == padding


def test_nothing_of_it_listens_on_a_network(served: Served) -> None:
    pids = [served.engine.process.pid, *served.engine.call("pids")]
    assert len(pids) == 1 + served.layout.tp  # SGLang has no process between the owner and the ranks
    listening = {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1"}


def test_a_rank_of_another_group_that_is_killed_ends_the_engine(served: Served) -> None:
    """The last test that uses this engine."""
    family = [psutil.Process(pid) for pid in served.engine.call("pids")]
    family[-1].send_signal(signal.SIGKILL)
    served.engine.process.join(FEW_SECONDS)
    assert served.engine.process.exitcode == 1
    assert f"TP rank {served.layout.tp - 1}" in served.engine.log.read_text()
    _, alive = psutil.wait_procs(family, FEW_SECONDS)
    assert not alive


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """The owners, by node, of an engine of two groups on two nodes with one rank each; the model's output layer is its embedding."""
    folder = tmp_path_factory.mktemp("nodes")
    make_tiny_model(
        folder / "model",
        ["some text"],
        family="qwen3",
        vocab_size=330,
        num_layers=2,
        seed=1,
        fields={"initializer_range": 0.2, "tie_word_embeddings": True},
    )
    with reserve_port() as holder:
        port = holder.getsockname()[1]
    processes = [
        EngineProcess(
            EngineConfig(
                str(folder / "model"),
                tensor_parallel_size=2,
                attention_data_parallel_size=2,
                max_num_seqs=8,
                max_total_tokens=1024,
                nodes=2,
                node=node,
                address=f"127.0.0.1:{port}",
            ),
            folder / f"node-{node}.log",
        )
        for node in range(2)
    ]
    for process in processes:
        process.begin("start")
    for process in processes:
        process.end()
    yield processes
    for process in processes:
        process.process.kill()


@pytest.mark.slow
def test_groups_on_several_nodes(owners: list[EngineProcess], tmp_path: Path) -> None:
    """The other node's group gets its requests, and sends its answers to the first node's owner."""
    head, folder = owners[0], owners[0].log.parent / "model"
    with pytest.raises(NoValidWeightsError, match="before a sync"):
        head.call("generate", PROMPTS, UIDS, GREEDY)
    config, state = AutoConfig.from_pretrained(folder), weights(folder)
    sync_slices(head, tmp_path, [rank_slices(state, config, 2, rank, dp=2) for rank in range(2)], version=1)
    assert_serves(head, folder)
    assert_as_planned(head)
    begun = time.monotonic()
    for number in range(5):  # an idle engine wakes at once, on both nodes
        head.call("generate", PROMPTS[:1], [f"{number}/0"], SamplingParams(max_new_tokens=1))
    assert time.monotonic() - begun < 3
