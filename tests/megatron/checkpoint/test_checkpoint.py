"""Ranks' states are saved in one layout and loaded in the same or another layout."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.tiny_model import make_tiny_model
from megarl.checkpoints import FileFacts, seal_file
from megarl.megatron.checkpoint.checkpoint import Loaded, load_states, save_states
from tests.fixtures.indexers import CHOOSING
from tests.megatron.parity import VOCAB
from tests.megatron.states import Setting, Trainee, whole_tensors
from tests.ranks import RankPool

FAMILIES = {
    "tied": {"family": "qwen2", "tie_word_embeddings": True},
    "mixture": {"family": "qwen3_moe"},
    "latent": {
        "family": "deepseek_v3"
    },  # latent attention, a dense layer before the mixtures of experts, routers' biases
    "predicting": {"family": "deepseek_v3", "num_mtp_layers": 2},
    "choosing": {"family": "deepseek_v32", "fields": CHOOSING},
}
History = list[tuple[float, float, float]]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """From a name in FAMILIES to the folder of its tiny model."""

    @cache
    def make(name: str) -> str:
        sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB}
        return str(make_tiny_model(tmp_path_factory.mktemp(name), ["two words"], **sizes, **FAMILIES[name]))

    return make


def _save(
    rank: int, world: int, model: str, setting: Setting, folder: str
) -> tuple[dict[str, FileFacts], dict[str, str], History, dict[str, str]]:
    """Two steps, a save and three more steps. Returns: this rank's files, hashes at the save, the last three steps, hashes after them."""
    trainee = Trainee(rank, world, model, setting)
    trainee.steps(2)
    files = save_states(folder, trainee.states)
    saved = trainee.hashes()
    return files, saved, trainee.steps(3), trainee.hashes()


def _load(
    rank: int, world: int, model: str, setting: Setting, folder: str, again: str
) -> tuple[Loaded, dict[str, str], History, dict[str, str]]:
    """Load over other random weights, save again, take three steps. Returns: how it was loaded, hashes then, the steps, hashes after them."""
    trainee = Trainee(rank, world, model, setting, seed=5)
    loaded = load_states(folder, trainee.states)
    found = trainee.hashes()
    save_states(again, trainee.states)
    return loaded, found, trainee.steps(3), trainee.hashes()


def check(ranks: RankPool, folder: Path, model: str, saved: Setting, others: list[Setting]) -> None:
    """Save in one setting; load in the same setting and in others."""
    results = ranks.run(_save, model, saved, str(folder / "saved"), world=saved.world)
    files = [name for own, *_ in results for name in own]
    assert sorted(files) == sorted(path.name for path in (folder / "saved").iterdir())
    for name, facts in {name: facts for own, *_ in results for name, facts in own.items()}.items():
        assert seal_file(folder / "saved" / name) == facts
    expected = whole_tensors(folder / "saved")
    kinds = 3 if saved.dtype == torch.float32 else 4
    weights = sum(not key.startswith("optimizer.") for key in expected) - _num_buffers(expected)
    matrices = sum(key.startswith("optimizer.state.momentum_buffer.") for key in expected)
    uncopied = sum(".indexer.k_norm." in key and not key.startswith("optimizer.") for key in expected) * (
        kinds - 3
    )
    assert len(expected) == kinds * weights + _num_buffers(expected) - matrices - uncopied
    assert (matrices > 0) == saved.muon
    histories = [history for _, _, history, _ in results]

    back = ranks.run(_load, model, saved, str(folder / "saved"), str(folder / "same"), world=saved.world)
    for (_, then, history, after), (loaded, found, later, final) in zip(results, back, strict=True):
        assert loaded == Loaded(num_steps=2, exact=True)
        assert (found, later, final) == (then, history, after)

    for index, other in enumerate(others):
        again = folder / f"other-{index}"
        exact = (other.world, other.sizes) == (
            saved.world,
            saved.sizes,
        )  # whether or not the optimizer is distributed
        for loaded, _, later, _ in ranks.run(
            _load, model, other, str(folder / "saved"), str(again), world=other.world
        ):
            assert loaded == Loaded(num_steps=2, exact=exact)
            for step, wanted in zip(later, histories[0], strict=True):
                assert step == pytest.approx(wanted, rel=1e-5 if saved.dtype == torch.float32 else 1e-2)
        found = whole_tensors(again)
        assert found.keys() == expected.keys()
        assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []


def _num_buffers(tensors: dict[str, Any]) -> int:
    return sum(key.endswith("expert_bias") for key in tensors)


def test_dense(ranks: RankPool, tmp_path: Path, model_of: Callable[[str], str]) -> None:
    saved = Setting(4, {"pp": 2, "vpp": 2, "chunk_layers": (1, 1, 1, 1)})
    others = [Setting(4, {"tp": 2, "sp": True}, distributed=False), Setting(1, {})]
    check(ranks, tmp_path, model_of("tied"), saved, others)


def test_latent_attention_and_experts(
    ranks: RankPool, tmp_path: Path, model_of: Callable[[str], str]
) -> None:
    """The first stage has one layer, and no experts."""
    saved = Setting(4, {"pp": 2, "ep": 2, "first_layers": 1})
    others = [Setting(1, {}), Setting(4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, distributed=False)]
    check(ranks, tmp_path, model_of("latent"), saved, others)


def test_layers_of_multi_token_prediction(
    ranks: RankPool, tmp_path: Path, model_of: Callable[[str], str]
) -> None:
    """The layers and their optimizer states are saved; the last stage's embedding is a copy of the first stage's."""
    saved, others = Setting(2, {"pp": 2}, mtp=True), [Setting(2, {"tp": 2, "sp": True, "ep": 2}, mtp=True)]
    check(ranks, tmp_path, model_of("predicting"), saved, others)
    assert "mtp.layers.1.eh_proj.weight" in whole_tensors(tmp_path / "saved")


@pytest.mark.parametrize("on_host", [None, pytest.param(256, marks=pytest.mark.slow)])
def test_trained_indexers(
    ranks: RankPool, tmp_path: Path, model_of: Callable[[str], str], on_host: int | None
) -> None:
    """The norms of indexers' keys are in float32 in a bfloat16 model: one group of an optimizer has weights of two types."""
    how: dict[str, Any] = {"dtype": torch.bfloat16, "indexers": True}
    saved = Setting(2, {"ep": 2}, on_host=on_host, **how)
    check(ranks, tmp_path, model_of("choosing"), saved, [Setting(2, {"tp": 2, "sp": True, "ep": 2}, **how)])
    found = whole_tensors(tmp_path / "saved")
    copies = [key for key in found if key.startswith("optimizer.state.fp32_param.")]
    assert len(copies) > 30 and any(".indexer.wk." in key for key in copies)
    for key in copies:  # each is the copy of the weight with its name
        assert torch.equal(found[key].bfloat16(), found[key.removeprefix("optimizer.state.fp32_param.")]), key
    moments = found["optimizer.state.exp_avg.decoder.layers.0.self_attention.indexer.k_norm.bias"]
    assert moments.any()


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("tied", Setting(2, {}, dtype=torch.bfloat16), Setting(2, {"pp": 2}, False, torch.bfloat16)),
        ("tied", Setting(2, {}, dtype=torch.float16), Setting(1, {}, dtype=torch.float16)),
        pytest.param(
            "latent",
            Setting(4, {"ep": 2}, dtype=torch.bfloat16),
            Setting(1, {}, dtype=torch.bfloat16),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bfloat16", "float16", "bfloat16-experts"],
)
def test_float32_copies_and_loss_scales(
    ranks: RankPool,
    tmp_path: Path,
    model_of: Callable[[str], str],
    family: str,
    saved: Setting,
    loaded: Setting,
) -> None:
    check(ranks, tmp_path, model_of(family), saved, [loaded])


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        (
            "mixture",
            Setting(4, {"pp": 2, "ep": 2}, muon=True),
            [Setting(2, {"tp": 2, "sp": True}, False, muon=True)],
        ),
        (
            "tied",
            Setting(4, {"pp": 2, "vpp": 2}, dtype=torch.bfloat16, muon=True),
            [Setting(2, {}, dtype=torch.bfloat16, muon=True)],
        ),
        pytest.param(
            "latent",
            Setting(4, {"tp": 2, "sp": True, "ep": 2}, muon=True),
            [Setting(1, {}, muon=True), Setting(4, {"ep": 2}, False, muon=True)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["experts", "bfloat16", "latent"],
)
def test_muon(
    ranks: RankPool,
    tmp_path: Path,
    model_of: Callable[[str], str],
    family: str,
    saved: Setting,
    loaded: list[Setting],
) -> None:
    """A matrix has one state, saved at its weight's place in any layout."""
    check(ranks, tmp_path, model_of(family), saved, loaded)


def _refused(rank: int, world: int, model: str, setting: Setting, folder: str) -> str:
    with pytest.raises(ValueError, match="does not fit") as error:
        load_states(folder, Trainee(rank, world, model, setting).states)
    return str(error.value)


def test_states_of_another_optimizer_are_refused(
    ranks: RankPool, tmp_path: Path, model_of: Callable[[str], str]
) -> None:
    model, folder = model_of("tied"), str(tmp_path / "saved")
    ranks.run(_save, model, Setting(1, {}), folder, world=1)
    (text,) = ranks.run(_refused, model, Setting(1, {}, muon=True), folder, world=1)
    assert "optimizer.state.momentum_buffer.decoder.layers.0.mlp.linear_fc1.weight is missing" in text


EVERY = {
    "one": Setting(1, {}),
    "dp4": Setting(4, {}),
    "dp4-replicated": Setting(4, {}, distributed=False),
    "tp2-sp": Setting(4, {"tp": 2, "sp": True}),
    "cp2-pp2": Setting(4, {"cp": 2, "pp": 2}),
    "pp2-vpp2": Setting(4, {"pp": 2, "vpp": 2}),
    "uneven": Setting(2, {"pp": 2, "first_layers": 1}),
    "tp2-sp-ep4": Setting(4, {"tp": 2, "sp": True, "ep": 4}),
    "pp2-ep2": Setting(4, {"pp": 2, "ep": 2}),
    "tp2-sp-ep2-etp2": Setting(4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, distributed=False),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family in FAMILIES
        for name in EVERY
        if family != "predicting" and (family != "tied" or "-ep" not in name)
    ],
)
def test_every_layout_saves_and_loads(
    ranks: RankPool, tmp_path: Path, model_of: Callable[[str], str], family: str, name: str
) -> None:
    """Each layout's checkpoint is loaded in the same layout and in the next one. Unsharded tensors are compared, so this covers all layouts."""
    names = [other for other in EVERY if family != "tied" or "-ep" not in other]
    following = names[(names.index(name) + 1) % len(names)]
    check(ranks, tmp_path, model_of(family), EVERY[name], [EVERY[following]])
