"""The draft model that SGLang builds from the multi-token prediction layer, as a target of a sync."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.layout import make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import DRAFT
from megarl.models.config import QWEN_HYBRIDS
from megarl.weight_sync.layouts import EngineLayout, hf_layout, megatron_layout, sglang_layout
from megarl.weight_sync.receiver import Receiver, ReceiveReport
from megarl.weight_sync.served_model import RefusedError, draft_weights, remember_draft
from megarl.weight_sync.sync_plan import SyncPlan
from tests.rollout.manifests import Slices
from tests.rollout.sender import Sender
from tests.weight_sync.fusions import Rank, State, expected_sglang
from tests.weight_sync.shards import empty_shards, run_plan
from tests.weight_sync.test_receiver import ALL, BIAS, WEIGHT, Tiny

TRAINED = ParallelLayout(world=4, tp=2, pp=2, ep=2, first_layers=1)
LAYERS = 4  # of the tiny models, without the multi-token prediction layer
# SGLang's names of tensors that no other layer has (srt/models/deepseek_nextn.py, glm4_moe_nextn.py, 0.5.21); complete on every rank.
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


# These names for Qwen3-Next and Qwen3.5 (srt/models/qwen3_next_mtp.py, qwen3_5_mtp.py), by the files' names.
HYBRID = {
    "mtp.pre_fc_norm_embedding.weight": "pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight": "pre_fc_norm_hidden.weight",
    "mtp.fc.weight": "fc.weight",
    "mtp.norm.weight": "model.norm.weight",
}


def expected_draft(state: State, hf: dict, rank: Rank) -> State:
    """The layer has the parameters that it would have as the model's last layer."""
    hybrid = hf["model_type"].removesuffix("_text") in QWEN_HYBRIDS
    layer, last = f"model.layers.{LAYERS}.", f"model.layers.{LAYERS - 1}."
    layer = "mtp.layers.0." if hybrid else layer
    renamed = {
        last + name.removeprefix(layer): value for name, value in state.items() if name.startswith(layer)
    }
    found = expected_sglang(state | renamed, hf, rank)
    within = "layers.0" if hybrid else "decoder"
    decoder = {
        f"{DRAFT}model.{within}.{name.removeprefix(last)}": value
        for name, value in found.items()
        if name.startswith(last)
    }
    if hybrid:
        return decoder | {DRAFT + name: state[own] for own, name in HYBRID.items()}
    return decoder | {f"{DRAFT}model.{name}": state[layer + name] for name in OWN}


@pytest.mark.parametrize(
    "engines", [EngineLayout(draft=True), EngineLayout(4, 2, 2, num_engines=2, draft=True)]
)
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "qwen3_next", "qwen3_5_moe"]
)
def test_a_plan_fills_it_from_megatrons_ranks(tiny_model, family: str, engines: EngineLayout) -> None:
    model = tiny_model(family)
    sync = SyncPlan(model.config, TRAINED, engines, torch.float32, 20_000)
    trained = megatron_layout(model.config, TRAINED, mtp=True)
    ranks, served = empty_shards(trained), empty_shards(sglang_layout(model.config, engines))
    run_plan(make_plan(hf_layout(model.config, mtp=True), trained), [model.state], ranks)
    run_plan(sync.plan, ranks, served)
    for number, tensors in enumerate(served):
        rank = Rank(number % engines.tp, engines.tp, engines.ep, engines.dp)
        hf = model.config.hf
        expected = expected_sglang(model.decoder, hf, rank) | expected_draft(model.state, hf, rank)
        assert tensors.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(tensors[name], values), (number, name)


def test_it_is_planned_only_where_it_is_asked_for(tiny_model) -> None:
    without = sglang_layout(tiny_model("glm4_moe").config, EngineLayout(2))
    assert not [piece.local for piece in without.pieces(0) if piece.local.startswith(DRAFT)]
    with pytest.raises(
        ValueError, match=r"0 multi-token prediction layers .*: SGLang drafts tokens with one"
    ):
        sglang_layout(tiny_model("qwen3_moe").config, EngineLayout(2, draft=True)).pieces(0)


class Draft(torch.nn.Module):
    """A draft that shares the model's bias, and derives a tensor after each load."""

    def __init__(self, model: Tiny) -> None:
        super().__init__()
        self.head = torch.nn.Parameter(torch.full((2, 3), -1.0))
        self.bias = model.bias
        self.renewed = 0

    def post_load_weights(self) -> None:
        self.renewed += 1


HEAD = torch.arange(6.0).view(2, 3) + 50


@pytest.fixture
def senders() -> Iterator[list[Sender]]:
    made: list[Sender] = []
    yield made
    for one in made:
        one.close()


def receive(
    folder: Path,
    senders: list[Sender],
    slices: list,
    with_draft: bool = True,
    meanwhile: Callable[[Draft], object] = lambda draft: None,
) -> tuple[Tiny, Draft, ReceiveReport]:
    """A version arrives at an engine with a stand-in for SGLang's draft worker; `meanwhile` runs between the worker's start and the version."""
    senders.append(Sender(folder, [Slices(slices, {})], timeout=5.0))
    model = Tiny()
    draft = Draft(model)
    if with_draft:
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        remember_draft(None, SimpleNamespace(target_worker=worker, draft_runner=SimpleNamespace(model=draft)))
        assert [*draft_weights(model)] == [f"{DRAFT}head"]
        meanwhile(draft)
    sending = senders[-1].send(1)
    try:
        report = Receiver(model, senders[-1].told[0], "session").receive(1)
    finally:
        sending.exception()
    return model, draft, report


def test_a_receiver_fills_the_model_and_what_is_its_drafts_own(tmp_path, senders) -> None:
    model, draft, report = receive(tmp_path, senders, [*ALL, ("head", f"{DRAFT}head", [0, 0], HEAD)])
    assert report.bytes_draft == 0 and report.bytes_written == WEIGHT.nbytes + BIAS.nbytes + HEAD.nbytes
    assert torch.equal(model.weight, WEIGHT) and torch.equal(model.bias, BIAS)
    assert torch.equal(draft.head, HEAD) and draft.bias is model.bias and draft.renewed == 1


def test_a_draft_that_no_version_has_stays_as_it_is(tmp_path, senders) -> None:
    """A draft that was loaded from a folder keeps its tensors, except the ones that it shares with the model."""
    model, draft, report = receive(tmp_path, senders, ALL)
    assert report.bytes_draft == HEAD.nbytes and report.bytes_written == WEIGHT.nbytes + BIAS.nbytes
    assert torch.all(draft.head == -1) and torch.equal(draft.bias, BIAS) and not draft.renewed
    assert "head" not in dict(model.named_parameters())


def test_a_draft_that_was_not_kept_is_refused(tmp_path, senders) -> None:
    """Its memory may have been released without a copy. Tensors that it shares with the model may change with each version."""

    def lose(draft: Draft) -> None:
        draft.head.data[1, 2] = 0.5
        draft.bias.data += 1

    with pytest.raises(RefusedError, match=r"draft:head: checksum .* when the draft was loaded"):
        receive(tmp_path / "lost", senders, ALL, meanwhile=lose)
    receive(tmp_path / "shared", senders, ALL, meanwhile=lambda draft: draft.bias.data.add_(1))


def test_a_part_of_a_draft_is_refused(tmp_path, senders) -> None:
    part = ("head", f"{DRAFT}head", [0, 0], HEAD[:1])
    with pytest.raises(RefusedError, match="draft:head: 3 of 6 elements missing"):
        receive(tmp_path / "part", senders, [*ALL, part])
    with pytest.raises(RefusedError, match="the engine has no parameter 'draft:head'"):
        receive(tmp_path / "none", senders, [*ALL, part], with_draft=False)
