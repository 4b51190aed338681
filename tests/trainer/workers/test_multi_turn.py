"""From the configuration to trajectories of several turns, with an engine of scripted answers."""

import asyncio
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from examples.tiny_model import train_tokenizer
from megarl.config import ModelPathConfig, RolloutConfig
from megarl.config.schema.rollout import MultiTurnConfig
from megarl.data.routing import ROUTED_EXPERTS, RoutingShape
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import (
    MESSAGES,
    PROMPT_SCHEMA,
    TEMPLATE_KWARGS,
    TRAJECTORY_SCHEMA,
    environment_notes,
    expand_prompts,
    validate_trajectories,
    write_trajectories,
)
from megarl.rollout.completions import Flight
from megarl.rollout.engine import EngineCapacity, EngineCounts, EngineHungError, Generation, SamplingParams
from megarl.trainer.run.export import verify_greedy
from megarl.trainer.stages.scoring import join_scores
from megarl.trainer.workers.engine import EngineWorker
from megarl.trainer.workers.multi_turn import Players, tasks_of, turns_spec
from tests.data.shared import render_prompt

SAMPLING = SamplingParams(max_new_tokens=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Tom has 3 pens and buys 4. <<3+4>> #### 7"], 400).save_pretrained(folder)
    return ModelPathConfig(path=str(folder), tokenizer_path=str(folder))


def rollout(**options):
    return RolloutConfig(multi_turn=MultiTurnConfig(enable=True, **options))


class FakeEngine:
    """An engine that asks the calculator first, then answers with its result; sample 1 answers at once."""

    weight_version, last_sign, waiting, num_requests = 4, 0.0, 0, 0
    config = SimpleNamespace(request_timeout=60.0)
    routing = None
    keeps = False

    def __init__(self, tokenizer):
        self.tokenizer, self.loop, self.checked = tokenizer, asyncio.new_event_loop(), []

    def flight(self):
        return Flight(self.loop)

    def take_counts(self):
        return EngineCounts()

    def capacity(self):
        return EngineCapacity(64, 10**6)

    def check_request(self, uid, ids, sampling):
        self.checked.append(uid)

    async def answer(self, uid, ids, sampling, experts_from=0):
        prompt, _, told = self.tokenizer.decode(ids).partition("<|im_start|>tool\n")
        a, b = re.findall(r"\d+", prompt)[:2]
        text = f"#### {told.partition('<')[0]}" if told or "/1" in uid else f"<<{a}+{b}>>"
        said = [*self.tokenizer(text)["input_ids"], self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        return Generation(uid, said, [-1.0] * len(said), "stop", self.weight_version)


def prompts(tokenizer, pairs):
    texts = [f"Tom has {a} pens and buys {b}." for a, b in pairs]
    return pa.table(
        {
            "uid": [f"train:{row}" for row in range(len(pairs))],
            "data_source": ["megarl/arithmetic"] * len(pairs),
            "ground_truth": [str(a + b) for a, b in pairs],
            "extra_info": [json.dumps({"index": row}) for row in range(len(pairs))],
            "prompt_ids": [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts],
        },
        schema=PROMPT_SCHEMA,
    )


def start(worker, engine):
    """Set the attributes that the worker's constructor sets, without starting SGLang."""
    worker.engine, worker._of = engine, {}


def make_worker(model, **options):
    tokenizer = load_tokenizer(model.tokenizer_path, False)
    worker = EngineWorker.__new__(EngineWorker)  # its constructor starts SGLang
    start(worker, FakeEngine(tokenizer))
    spec = turns_spec(rollout(environment="calculator", **options), model, None, ())
    worker.players = Players(spec, worker.engine.answer, ())
    return worker, tokenizer


def answered(worker, requests):
    """All trajectories of one call of `land`, in the order of the requests."""
    table = worker.land(60.0, [(requests, SAMPLING)]).table
    found = table["uid"].to_pylist()
    return table.take([found.index(uid) for uid in requests["uid"].to_pylist()])


def test_trajectories_come_as_tables_and_in_order_from_a_call(model):
    worker, tokenizer = make_worker(model)
    requests = expand_prompts(prompts(tokenizer, [(3, 4), (5, 9)]), 2)
    landed = worker.land(60.0, [(requests.slice(0, 2), SAMPLING), (requests.slice(2), SAMPLING)])
    assert sorted(landed.table["uid"].to_pylist()) == requests["uid"].to_pylist() == worker.engine.checked
    assert landed.busy > 0.0 and worker.begin_generation()[1] == []
    none = worker.land(60.0)
    assert none.table is None and none.busy == 0.0
    called = answered(worker, requests)
    assert called["uid"].to_pylist() == requests["uid"].to_pylist()
    for table in (landed.table, called):
        assert table.schema == TRAJECTORY_SCHEMA
        validate_trajectories(table)
    assert called["num_turns"].to_pylist() == [2, 1, 2, 1]
    assert set(called["weight_version"].to_pylist()) == {4}
    texts = tokenizer.batch_decode(called["response_ids"].to_pylist(), skip_special_tokens=True)
    assert texts[0] == "<<3+4>>\ntool\n7\nassistant\n#### 7" and texts[2].endswith("#### 14")
    assert [note.numbers["num_turns"] for note in environment_notes(called)] == [2.0, 1.0, 2.0, 1.0]


def test_only_answers_that_are_learnt_from_have_experts(model):
    """Of an engine that returns experts: a validation's answers would be many times as large with them."""
    worker, tokenizer = make_worker(model)
    worker.engine.routing = RoutingShape(2, 2, 8)
    requests = expand_prompts(prompts(tokenizer, [(3, 4)]), 2)
    for wanted in (True, False):
        table = worker.land(60.0, [(requests, replace(SAMPLING, return_experts=wanted))]).table
        assert (ROUTED_EXPERTS in table.column_names) is wanted and table.num_rows == 2


def test_a_validation_does_not_land_what_training_has_in_flight(model):
    worker, tokenizer = make_worker(model)
    requests = expand_prompts(prompts(tokenizer, [(3, 4)]), 2)
    landed = worker.land(0.0, [(requests, SAMPLING)])  # the requests are still waiting
    assert landed.table is None and worker.begin_generation()[1] == requests["uid"].to_pylist()
    assert worker.land(60.0, [(requests, SAMPLING)], "batch").table.num_rows == 2
    assert worker.land(60.0, [(requests, SAMPLING)], "left behind").table.num_rows == 2
    worker.land(0.0, [(requests, SAMPLING)], "batch")
    assert worker.begin_generation("batch", True)[1] == worker.begin_generation("batch")[1] == []
    assert worker.land(60.0).table.num_rows == 2


def test_what_an_environment_took_part_in_cannot_be_verified_without_it(model, task, tmp_path):
    worker, tokenizer = make_worker(model)
    table = answered(worker, expand_prompts(prompts(tokenizer, [(3, 4)]), 1))
    path = write_trajectories(table, tmp_path / "trajectories.parquet")
    with pytest.raises(ValueError, match="several turns"):
        verify_greedy(str(task / "model"), str(path), 8)


def test_numbers_and_failures_of_environments_join_the_rewards(model):
    worker, tokenizer = make_worker(model)
    requests = expand_prompts(prompts(tokenizer, [(3, 4), (5, 9)]), 1)
    table = answered(worker, requests)
    at = table.schema.get_field_index("environment_notes")
    notes = [table["environment_notes"][0].as_py(), json.dumps({"numbers": {}, "error": "step: gone"})]
    scored = join_scores(table.set_column(at, table.schema.field(at), pa.array(notes)), {})
    assert scored.errors == [None, "environment: step: gone"]
    np.testing.assert_array_equal(scored.numbers["calculator_calls"], [1.0, np.nan])
    assert scored.live.tolist() == [True, False]


def test_the_environment_is_told_of_the_task(model):
    worker, tokenizer = make_worker(model)
    table = prompts(tokenizer, [(3, 4)])
    (task,) = tasks_of(expand_prompts(table, 1), worker.engine.tokenizer)
    assert (task.uid, task.ground_truth, task.extra_info) == ("train:0/0", "7", {"index": 0})
    assert task.prompt == "user\nTom has 3 pens and buys 4.\nassistant\n" and task.messages is None
    chat = [{"role": "user", "content": "Tom has 3 pens and buys 4."}]
    (task,) = tasks_of(
        expand_prompts(table.append_column(MESSAGES, pa.array([json.dumps(chat)])), 1),
        worker.engine.tokenizer,
    )
    assert task.messages == chat and task.template_kwargs is None
    keywords = {"tools": [{"name": "f"}]}
    given = table.append_column(TEMPLATE_KWARGS, pa.array([json.dumps(keywords)]))
    (task,) = tasks_of(expand_prompts(given, 1), worker.engine.tokenizer)
    assert task.template_kwargs == keywords


def test_the_configuration_says_how_far_it_goes(model, tmp_path):
    assert turns_spec(RolloutConfig(), model, None, ()) is None
    (tmp_path / "mine.py").write_text("")
    section = rollout(environment="calculator", options={"role": "user"}, max_assistant_turns=3)
    spec = turns_spec(section, model, {"enable_thinking": False}, (str(tmp_path / "mine.py"),))
    assert spec.multi_turn is section.multi_turn and spec.model is model
    assert spec.template_kwargs == {"enable_thinking": False}
    with pytest.raises(ValueError, match="'calculater' is unknown; known: calculator"):
        turns_spec(rollout(environment="calculater"), model, None, ())
    with pytest.raises(ValueError, match="unexpected keyword argument 'roles'"):
        turns_spec(rollout(environment="calculator", options={"roles": 1}), model, None, ())


def test_without_an_environment_there_is_one_turn(model):
    tokenizer = load_tokenizer(model.tokenizer_path, False)
    worker = EngineWorker.__new__(EngineWorker)
    worker.players = None

    async def answer(uid, ids, sampling, experts_from=0):
        return Generation(uid, [5, 6], [-1.0, -2.0], "length", 4)

    start(worker, FakeEngine(tokenizer))
    worker.engine.answer = answer
    table = answered(worker, expand_prompts(prompts(tokenizer, [(3, 4)]), 1))
    assert table["num_turns"].to_pylist() == [1] and np.isnan(table["environment_score"][0].as_py())
    assert environment_notes(table)[0].numbers == {} and table["response_mask"].to_pylist() == [[True, True]]


def test_an_engine_that_answers_nothing_hangs(model):
    worker = EngineWorker.__new__(EngineWorker)
    worker.players = None
    tokenizer = load_tokenizer(model.tokenizer_path, False)
    start(worker, FakeEngine(tokenizer))
    worker.engine.num_requests, worker.engine.config = 1, SimpleNamespace(request_timeout=0.0)

    async def answer(uid, ids, sampling):
        await asyncio.Event().wait()

    worker.engine.answer = answer
    with pytest.raises(EngineHungError, match="neither computed a step for any of 1 requests"):
        worker.land(0.0, [(expand_prompts(prompts(tokenizer, [(3, 4)]), 1), SAMPLING)])
    worker.begin_generation(anew=True)
