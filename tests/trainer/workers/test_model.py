"""Checkpoints of a role's ranks: full models, and adapters in two roles."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import compare, convert
from megarl.checkpoints.hf.adapters import write_peft_adapter
from megarl.checkpoints.hf.export import write_hf_checkpoint
from megarl.cluster.ranks import RankInfo
from megarl.config import LoraConfig, MegatronConfig, OptimConfig
from megarl.megatron.checkpoint import checkpoint
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import ModelSpec, PredictionTraining, forward_plan, update_plan
from megarl.trainer.workers.model import ModelWorker
from megarl.trainer.workers.scalar_heads import ActorCriticWorker, CriticWorker
from tests.megatron.hf import VOCAB, save_model
from tests.ranks import RankPool
from tests.trainer.test_lora import CRITIC_LORA, CUT, HOW, LORA, MEAN, assert_same, table
from tests.trainer.workers.test_actor import TEMPERATURE

TP2, PP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
SHARED = {"fsdp": "optim_grads_params"}
DROPOUT = replace(LORA, dropout=0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return str(folder), save_model(folder, tied=True)


def make(
    rank: int, world: int, folder: str, megatron: dict[str, Any], lora: LoraConfig, mtp: bool = False
) -> ModelWorker:
    """A rank of the actor, with adapters also of the critic. `mtp`: with multi-token prediction layers."""
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    optim = OptimConfig(lr=3e-2, lr_decay_style="linear")
    spec = ModelSpec(folder, "lm", MegatronConfig(**megatron), optim, num_updates=9, timeout=60.0, lora=lora)
    if mtp:
        spec = replace(spec, mtp=PredictionTraining(0.3, detached=True))
    if not lora.rank:
        return ActorWorker(info, spec, TEMPERATURE)
    critic = replace(spec, head="value", lora=replace(CRITIC_LORA, dropout=lora.dropout))
    return ActorCriticWorker(info, spec, TEMPERATURE, None, critic)


def one_round(worker: ModelWorker) -> list[Any]:
    """The metrics of one update of each of the worker's roles."""
    rows = table()
    plan, counts = update_plan(rows, worker.layout, CUT, 3)
    found = [worker.update_policy(rows, plan, counts, HOW)]
    if isinstance(worker, ActorCriticWorker):
        found.append(worker.update_values(rows, plan, counts, MEAN, 0.5))
        shares = forward_plan(rows, worker.layout, CUT)
        found.append(worker.compute_values(rows, shares))
    return found


def _save(
    rank: int,
    world: int,
    model: str,
    megatron: dict[str, Any],
    lora: LoraConfig,
    folder: str,
    mtp: bool = False,
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """A round, a save of each role, another round. Returns the files, the results of the second round, and bundles with the policy."""
    worker = make(rank, world, model, megatron, lora, mtp)
    one_round(worker)
    files = {}
    for role in ("actor", "critic") if lora.rank else ("actor",):
        # Parts that a save does not need may be off the device; accessing them would crash the process.
        needed = {
            "actor": ("adapters", "weights", "optimizer"),
            "critic": ("critic_adapters", "critic_optimizer"),
        }
        away = [part for part in worker.parts if part not in needed[role]]
        worker.release_memory(away)
        worker.begin_save(f"{folder}/{role}", role, background=False)
        written = worker.finish_save(role)
        worker.resume_memory(away)
        files |= {f"{role}/{name}": facts for name, facts in written.items()}
    # `replace` drops a plan's cached results, which cannot be pickled.
    if lora.rank:
        plan = worker.adapter_plan()
        bundles = [replace(plan), worker.pack_adapters()]
    else:
        plan = worker.export_plan(mtp)
        held = worker.memory()
        bundles = [replace(plan), [worker.pack_export(shard) for shard in range(len(plan.shards))]]
        assert worker.memory() == held  # weights that were gathered for the export are sharded again
    return files, one_round(worker), bundles


def _load(
    rank: int,
    world: int,
    model: str,
    megatron: dict[str, Any],
    lora: LoraConfig,
    folder: str,
    mtp: bool = False,
) -> tuple[list[bool], list[Any]]:
    worker = make(rank, world, model, megatron, lora, mtp)
    roles = ("actor", "critic") if lora.rank else ("actor",)
    exact = [worker.load_checkpoint(f"{folder}/{role}", role).exact for role in roles]
    return exact, one_round(worker)


def check_files(folder: Path, results: list[tuple[dict[str, Any], Any, Any]]) -> None:
    """Every file is reported by exactly one rank, which wrote it."""
    named = [name for files, *_ in results for name in files]
    assert sorted(named) == sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def assert_close(found: Any, expected: Any) -> None:
    """The metrics of two policies' updates are equal up to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("megatron", [TP2, SHARED], ids=["tp2", "fsdp"])
def test_a_model_goes_on_and_is_converted(
    ranks: RankPool, model: tuple[str, PreTrainedModel], tmp_path: Path, megatron: dict[str, Any]
) -> None:
    folder, lora = str(tmp_path), LoraConfig()
    results = ranks.run(_save, model[0], megatron, lora, folder, world=2)
    check_files(tmp_path, results)
    for (_, expected, _), (exact, found) in zip(
        results, ranks.run(_load, model[0], megatron, lora, folder, world=2), strict=True
    ):
        assert exact == [True]
        assert_same(found, expected)

    plan = results[0][2][0]
    write_hf_checkpoint(
        str(tmp_path / "exported"),
        model[0],
        plan,
        lambda shard: [bundles[1][shard] for *_, bundles in results],
    )
    convert(str(tmp_path / "actor"), str(tmp_path / "converted"))
    compared = compare(str(tmp_path / "exported"), str(tmp_path / "converted"))
    assert compared.equal and compared.num_equal > 20
    assert not compare(model[0], str(tmp_path / "converted")).equal


def test_trained_prediction_layers_go_on_and_are_converted(ranks: RankPool, tmp_path: Path) -> None:
    """The layers are saved, resumed, exported and converted with the model; the exported layers are the trained ones."""
    model = make_tiny_model(
        tmp_path / "model",
        ["two words"],
        family="deepseek_v3",
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_hidden_size=64,
        num_layers=2,
        num_mtp_layers=1,
        fields={"initializer_range": 0.1},
    )
    given = (str(model), PP2, LoraConfig(), str(tmp_path / "saved"), True)
    results = ranks.run(_save, *given, world=2)
    for (_, expected, _), (exact, found) in zip(results, ranks.run(_load, *given, world=2), strict=True):
        assert exact == [True]
        assert_same(found, expected)
        for step in found[0]:
            # One response has a prompt of one token, so that no position two places before its first token can predict it.
            assert step["actor/tokens"] - 1 <= step["actor/mtp_tokens"] <= step["actor/tokens"]
            assert 0 < step["actor/mtp_loss"] / step["actor/mtp_tokens"] < 9
    exported, converted = str(tmp_path / "exported"), str(tmp_path / "converted")
    collect = lambda shard: [bundles[1][shard] for *_, bundles in results]  # noqa: E731
    write_hf_checkpoint(exported, str(model), results[0][2][0], collect)
    convert(str(tmp_path / "saved" / "actor"), converted)
    assert compare(exported, converted).equal
    old, new = (load_file(f"{folder}/model.safetensors") for folder in (model, exported))
    assert old.keys() == new.keys()
    same = [name for name in old if torch.equal(old[name], new[name])]
    assert all(name.endswith("e_score_correction_bias") for name in same)


def _critic(rank: int, world: int, model: str, megatron: dict[str, Any]) -> list[Any]:
    """A critic's values, the results of two updates, after each of which its memory leaves the device and returns, and its values then."""
    info = RankInfo(rank, world, rank, "localhost", 0, "critic", "", (), "")
    optim = OptimConfig(lr=3e-2, lr_decay_style="linear")
    worker = CriticWorker(
        info, ModelSpec(model, "value", MegatronConfig(**megatron), optim, num_updates=9, timeout=60.0)
    )
    rows = table()
    plan, counts = update_plan(rows, worker.layout, CUT, 3)
    shares = forward_plan(rows, worker.layout, CUT)
    found = [worker.compute_values(rows, shares)]
    for _ in range(2):
        found.append(worker.update_values(rows, plan, counts, MEAN, 0.5))
        worker.release_memory(list(worker.parts))
        assert not any(worker.memory()[0][part] for part in worker.parts)
        worker.resume_memory(list(worker.parts))
    return [*found, worker.compute_values(rows, shares)]


def test_a_critic_that_shares_its_weights_learns_the_same(
    ranks: RankPool, model: tuple[str, PreTrainedModel]
) -> None:
    expected = ranks.run(_critic, model[0], {}, world=2)
    for megatron in ({"fsdp": "optim_grads"}, SHARED):
        for found, wanted in zip(ranks.run(_critic, model[0], megatron, world=2), expected, strict=True):
            assert_close(found[1], wanted[1])
            assert_close(found[2], wanted[2])
            for (rows, columns), (others, right) in ((found[0], wanted[0]), (found[3], wanted[3])):
                assert rows == others
                np.testing.assert_allclose(columns["values"][0], right["values"][0], rtol=1e-4, atol=1e-5)


def test_adapters_of_two_roles_go_on(
    ranks: RankPool, model: tuple[str, PreTrainedModel], tmp_path: Path
) -> None:
    """With dropout, random streams are resumed, too. Another layout has other streams, so that test has no dropout."""
    folder = tmp_path / "saved"
    results = ranks.run(_save, model[0], TP2, DROPOUT, str(folder), world=2)
    check_files(folder, results)
    for (_, expected, _), (exact, found) in zip(
        results, ranks.run(_load, model[0], TP2, DROPOUT, str(folder), world=2), strict=True
    ):
        assert exact == [True, True]
        assert_same(found, expected)

    write_peft_adapter(
        str(tmp_path / "exported"), model[0], results[0][2][0], [bundles[1] for *_, bundles in results]
    )
    with pytest.raises(ValueError, match="has adapters and no weights; --to peft writes them"):
        convert(str(folder / "actor"), str(tmp_path / "converted"))
    convert(str(folder / "actor"), str(tmp_path / "converted"), to="peft")
    assert compare(str(tmp_path / "exported"), str(tmp_path / "converted")).equal

    other = str(shutil.copytree(model[0], tmp_path / "other"))
    _change_weights(Path(other) / "model.safetensors")
    for message in ranks.run(_refusal, other, DROPOUT, str(folder / "actor"), world=1):
        assert f"it has adapters on the model {model[0]} (sha256 " in message
        assert f"), this run trains adapters on the model {other} (sha256 " in message

    plain = tmp_path / "plain"
    results = ranks.run(_save, model[0], TP2, LORA, str(plain), world=2)
    for exact, found in ranks.run(_load, model[0], PP2, LORA, str(plain), world=2):
        assert exact == [False, False]
        for role in (0, 1):
            assert_close(found[role], results[0][1][role])


def _change_weights(file: Path) -> None:
    """Change the weights, as another training of the same model would."""
    save_file({name: tensor + 1e-3 for name, tensor in load_file(file).items()}, file)


def _refusal(rank: int, world: int, model: str, lora: LoraConfig, folder: str) -> str:
    worker = make(rank, world, model, {}, lora)
    with pytest.raises(ValueError) as caught:
        worker.load_checkpoint(folder, "actor")
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [None, 4])
def test_adapters_of_experts_in_another_layout(ranks: RankPool, tmp_path: Path, groups: int | None) -> None:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    model = str(make_tiny_model(tmp_path / "model", ["one two"], family="qwen3_moe", **sizes))
    lora, folder = replace(LORA, expert_groups=groups), str(tmp_path / "saved")
    ep2 = {"expert_model_parallel_size": 2, **TP2}
    results = ranks.run(_save, model, ep2, lora, folder, world=4)
    for megatron, world in ((ep2, 4), ({}, 1)):
        for exact, found in ranks.run(_load, model, megatron, lora, folder, world=world):
            assert exact == [world == 4] * 2
            for role in (0, 1):
                assert_close(found[role], results[0][1][role])


def _order_of_waits(rank: int, world: int, model: str, folder: str) -> list[str]:
    """What a rank does, in its order, when its own files are written and read: waits for the others' files, and collectives."""
    worker, done = make(rank, world, model, TP2, LoraConfig()), list[str]()
    raise_on_all = checkpoint._raise_on_all

    def collective(error: BaseException | None, action: str) -> None:
        done.append(f"collective: {action}")
        raise_on_all(error, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "wait_for_ranks", done.append)
        patch.setattr(checkpoint, "_raise_on_all", collective)
        for name in ("write_file", "fill"):
            patch.setattr(checkpoint, name, _noted(getattr(checkpoint, name), name, done))
        worker.begin_save(f"{folder}/actor", "actor", background=True)
        worker.finish_save("actor")
        assert worker.load_checkpoint(f"{folder}/actor", "actor").exact
    return done


def _noted(function: Callable[..., Any], name: str, done: list[str]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        done.append(name)
        return function(*arguments)

    return noted


def test_ranks_with_slow_disks_are_waited_for_before_collectives(
    ranks: RankPool, model: tuple[str, PreTrainedModel], tmp_path: Path
) -> None:
    """A collective has a shorter timeout than files of a shared file system may need."""
    folder = f"{tmp_path}/actor"
    for done in ranks.run(_order_of_waits, model[0], str(tmp_path), world=2):
        written, read = done.index(f"{folder} is written"), done.index(f"{folder} is read")
        assert done[written - 1 : written + 2] == ["write_file", done[written], "collective: save"]
        assert done[read - 1 : read + 2] == ["fill", done[read], "collective: load"]
