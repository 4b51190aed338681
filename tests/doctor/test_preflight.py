"""The problems of a run, all reported at once before any of its processes starts."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.tiny_model import make_tiny_model
from megarl.checkpoints import CheckpointStore, Keep
from megarl.cli.main import main
from megarl.config import load_config, resolve, save_config
from megarl.config.loading import SCHEMAS, hub
from megarl.doctor.preflight import ROWS, delta_net_problems, preflight
from megarl.models import read_model_config
from megarl.util.gpus import Gpu
from tests.fixtures.runs import PPO, REPOSITORY, on
from tests.fixtures.tiny_models import as_type

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TUNING = ("data.max_length=64", "data.train_batch_size=4", "optim.lr=1e-3", "max_token_len_per_gpu=128")


def problems(command: str, recipe: str | None, *overrides: str) -> list[str]:
    """The lines of the report; none if the run may start."""
    config = load_config(SCHEMAS[command], None if recipe is None else REPOSITORY / recipe, overrides)
    try:
        preflight(config)
    except ValueError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return []


@pytest.fixture
def train(task: Path, tmp_path: Path) -> Callable[..., list[str]]:
    recipe, *keys = PPO
    return lambda *overrides: problems("train", recipe, *keys, *on(task, tmp_path / "run"), *overrides)


def wrong_file(task: Path, path: Path, change: Callable[[dict], None], first: int = 0) -> Path:
    """A copy of the task's prompts in which all rows from number `first` on are changed."""
    rows = pq.read_table(task / "data/train.parquet").to_pylist()
    for row in rows[first:]:
        change(row)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_run_that_may_start(train: Callable[..., list[str]]) -> None:
    assert train() == []


def test_a_type_without_a_family_that_computes_something_else(
    train: Callable[..., list[str]], task: Path, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", ["two words"], hidden_size=64, family="llama")
    as_type(folder, "helium", "HeliumForCausalLM")
    (line,) = train(f"critic.model.path={folder}")
    assert line.startswith("critic.model.path: model_type 'helium' has the fields and weights of Llama's")


def test_keys_layouts_models_and_data_are_told_together(
    train: Callable[..., list[str]], task: Path, tmp_path: Path
) -> None:
    no_prompt = wrong_file(task, tmp_path / "renamed.parquet", lambda row: row.pop("prompt"))
    (tmp_path / "cut.parquet").write_bytes((task / "data/test.parquet").read_bytes()[:-9])
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text(json.dumps({"model_type": "mamba"}))
    found = train(
        f"{ACTOR}.ppo_mini_batch_size=7",
        f"{ACTOR}.megatron.tensor_model_parallel_size=3",
        f"{ROLLOUT}.tensor_model_parallel_size=3",
        f"critic.model.path={tmp_path}/odd",
        f"data.train_files={no_prompt}",
        f"data.val_files={tmp_path}/cut.parquet",
        "trainer.n_gpus_per_node=12",
    )
    for beginning in (
        f"{ACTOR}.ppo_mini_batch_size=7 does not divide data.train_batch_size=8",
        f"{ACTOR}.megatron.tensor_model_parallel_size=3 does not divide num_attention_heads=4",
        f"{ROLLOUT}.tensor_model_parallel_size=3 does not divide num_attention_heads=4",
        f"data.train_files: {no_prompt}: no column 'prompt'",
        f"data.val_files: data file {tmp_path}/cut.parquet is not a valid Parquet file",
    ):
        assert sum(line.startswith(beginning) for line in found) == 1, (beginning, found)
    assert sum(line.startswith("critic.model.path: ") and "'mamba' is not" in line for line in found) == 1, (
        found
    )


def test_the_command_tells_before_it_starts_anything(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("megarl.cli.main._run_with_restarts", lambda *_: pytest.fail("a process would start"))
    keys = [*PPO, *on(task, tmp_path / "run"), f"{ROLLOUT}.tensor_model_parallel_size=3"]
    assert main(["train", *keys]) == 2
    assert f"{ROLLOUT}.tensor_model_parallel_size=3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_first_rows_of_each_file_are_looked_at(
    train: Callable[..., list[str]], task: Path, tmp_path: Path
) -> None:
    def empty(row: dict) -> None:
        row["prompt"] = []

    late = wrong_file(task, tmp_path / "late.parquet", empty, ROWS)
    early = wrong_file(task, tmp_path / "early.parquet", empty, ROWS - 1)
    (line,) = train(f"data.train_files=[{late},{early}]")
    assert line.startswith(f"data.train_files: {early} row {ROWS - 1}: 'prompt' must be a non-empty list")
    (line,) = train(f"data.val_sets.other.files={early}")
    assert line.startswith(f"data.val_sets.other.files: {early} row {ROWS - 1}: ")


def test_rows_that_fill_no_batch(train: Callable[..., list[str]]) -> None:
    (line,) = train("data.train_batch_size=72")
    assert (
        line
        == "data.train_files: 64 rows, too few for one batch of data.train_batch_size=72: lower it or give more data"
    )


def test_sizes_that_are_none_are_told_once(train: Callable[..., list[str]]) -> None:
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        found = train(f"{ACTOR}.megatron.{name}=0")
        assert [line for line in found if f"{ACTOR}.megatron.{name}=0" in line] == [
            f"{ACTOR}.megatron.{name}=0 is out of range: it must be at least 1"
        ]
    (line,) = train(f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization_block_size=[0,16]")
    assert line == f"{ROLLOUT}.quantization_block_size=0 is out of range: it must be at least 1"
    assert any("rollout.tensor_model_parallel_size=0 is out of range" in line for line in train(
        f"{ROLLOUT}.tensor_model_parallel_size=0"
    ))  # fmt: skip


def test_engines_on_gpus_have_equal_shares_of_the_vocabulary(
    task: Path, tmp_path: Path, train: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's VocabParallelEmbedding divides it so on GPUs; on a CPU it pads further."""
    heads = with_facts(
        task,
        tmp_path / "six",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=96,
    )
    keys = (f"actor_rollout_ref.model.path={heads}", f"{ROLLOUT}.tensor_model_parallel_size=3")
    assert train(*keys) == []
    monkeypatch.setattr("megarl.doctor.preflight.gpus_here", lambda: (Gpu("H100", "550", 80 << 30, 0),))
    (line,) = train(*keys)
    assert line.startswith(f"{ROLLOUT}.tensor_model_parallel_size=3 does not divide the model's ")
    # A group of one rank has an unsharded head.
    groups = (f"{ROLLOUT}.attention_data_parallel_size=3", f"{ROLLOUT}.data_parallel_lm_head=true")
    assert not [line for line in train(*keys, *groups) if "does not divide the model's" in line]
    assert train() == []


def test_adapters_that_fit_no_layer(train: Callable[..., list[str]], task: Path) -> None:
    lora = "actor_rollout_ref.model.lora"
    assert train(f"{lora}.rank=4", f"{ROLLOUT}.lora_sync=merged") == []
    (line,) = train(f"{lora}.rank=4", f"{lora}.target_modules=[q_prij]")
    assert line.startswith(f"{lora}.target_modules") and "q_prij" in line
    files = (f"model.path={task}/model", f"data.train_files={task}/data/sft.parquet")
    keys = ("data.response_key=extra_info.answer", "model.lora.rank=4", "model.lora.target_modules=[q_prij]")
    (line,) = problems("sft", None, *TUNING, *files, *keys)
    assert line.startswith("model.lora.target_modules") and "q_prij" in line


def test_every_command_looks_at_its_data(task: Path, tmp_path: Path) -> None:
    model, data = f"model.path={task}/model", task / "data/train.parquet"
    files = f"data.train_files={data}"
    response = "data.response_key=extra_info.answer"
    assert problems("sft", None, *TUNING, model, f"data.train_files={task}/data/sft.parquet", response) == []
    (line,) = problems("sft", None, *TUNING, model, files, "data.response_key=answer")
    assert line.startswith(f"data.train_files: {data}: no column 'answer'")
    (line,) = problems("sft", None, *TUNING, model, files, "data.text_key=extra_info.none")
    assert line.startswith(f"data.train_files: {data} row 0: no 'extra_info.none'")
    for command in ("rm", "dpo"):
        (line,) = problems(command, None, *TUNING, model, files)
        assert line.startswith(f"data.train_files: {data}: no column 'chosen'")
    rows = [{"prompt": "one?", "chosen": "1", "rejected": "2"}] * 4
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    pairs = f"data.train_files={tmp_path}/pairs.parquet"
    for command in ("rm", "dpo"):
        assert problems(command, None, *TUNING, model, pairs) == []
        (line,) = problems(command, None, *TUNING, model, pairs, f"data.val_files={data}")
        assert line.startswith(f"data.val_files: {data}: no column 'chosen'")
    labelled = [{"prompt": "one?", "completion": "1", "label": label} for label in (True, 0, None, False)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    kto, files = (*TUNING, "dpo.loss_type=kto"), f"data.train_files={tmp_path}/labels.jsonl"
    assert problems("dpo", None, *kto, model, pairs) == []
    (line,) = problems("dpo", None, *kto, model, files)
    assert line.startswith(
        f"data.train_files: {tmp_path}/labels.jsonl row 1: 'label' must be true (desirable)"
    )
    evaluated = ("data.max_prompt_length=48", "data.max_response_length=8", "data.reward_fn_key=source")
    (line,) = problems("eval", None, model, *evaluated, f"data.val_files={data}")
    assert line.startswith(f"data.val_files: {data}: no column 'source'")


def test_a_model_of_the_hub_is_asked_for_once_all_keys_are_right(
    train: Callable[..., list[str]], task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(key: str, name: str, patterns: tuple[str, ...]) -> str:
        asked.append((key, patterns))
        return f"{task}/model"

    monkeypatch.setattr(hub, "_download", download)
    assert train("actor_rollout_ref.model.path=some/model", "trainer.n_gpus_per_node=3") and not asked
    (line,) = train("actor_rollout_ref.model.path=some/model", f"{ROLLOUT}.tensor_model_parallel_size=3")
    assert line.startswith(f"{ROLLOUT}.tensor_model_parallel_size=3 does not divide")
    # Roles of the same id have the same folder.
    assert {key for key, _ in asked} == {"actor_rollout_ref.model.path"}
    assert not any("*.safetensors" in patterns for _, patterns in asked)


def saved(config_of: list[str], folder: Path, model: Path, step: int = 1) -> Path:
    """A checkpoint of a run with these overrides, with only the parts that are read before a start."""
    recipe, *keys = PPO
    config = resolve(load_config(SCHEMAS["train"], REPOSITORY / recipe, [*keys, *config_of]))
    with CheckpointStore(folder / "run/checkpoints", Keep(1)) as store, store.building(step) as partial:
        save_config(config, partial / "config.yaml")
        for role in ("actor", "critic"):
            (partial / role / "hf").mkdir(parents=True)
            (partial / role / "hf/config.json").write_bytes((model / "config.json").read_bytes())
        files = {str(path.relative_to(partial)): None for path in partial.rglob("*") if path.is_file()}
        return store.commit(step, partial, files, {"step": step}).folder


def with_facts(task: Path, folder: Path, **facts: object) -> Path:
    """The task's model with another config.json."""
    folder.mkdir()
    for file in (task / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    hf = json.loads((folder / "config.json").read_text())
    assert hf.keys() >= facts.keys()
    (folder / "config.json").write_text(json.dumps(hf | facts))
    return folder


def test_another_model_than_the_checkpoint_has(
    train: Callable[..., list[str]], task: Path, tmp_path: Path
) -> None:
    keys = on(task, tmp_path / "run")
    folder = saved(keys, tmp_path, task / "model")
    assert train() == []
    moved = with_facts(task, tmp_path / "moved", dtype="bfloat16", max_position_embeddings=2048)
    assert train(f"actor_rollout_ref.model.path={moved}") == []
    other = with_facts(task, tmp_path / "other", hidden_size=128, num_key_value_heads=4)
    found = train(f"actor_rollout_ref.model.path={other}", f"critic.model.path={task}/model")
    assert found == [
        f"the run cannot go on from {folder}: actor_rollout_ref.model.path={other} is another model than the one that was saved: "
        "hidden_size was 64, is 128, num_query_groups was 2, is 4, head_dim was 16, is 32; give that one, another trainer.default_local_dir, or "
        "trainer.resume_mode=disable"
    ]
    (line,) = train(f"critic.model.path={other}")
    assert line.startswith(f"the run cannot go on from {folder}: critic.model.path={other} is another model")
    assert train(f"critic.model.path={other}", "trainer.resume_mode=disable") == []
    elsewhere = ("trainer.resume_mode=path", f"trainer.resume_from_path={folder}")
    assert len(train(f"critic.model.path={other}", *elsewhere)) == 1


def test_what_a_checkpoint_cannot_go_on_with_is_told_with_the_rest(
    train: Callable[..., list[str]], task: Path, tmp_path: Path
) -> None:
    folder = saved(on(task, tmp_path / "run"), tmp_path, task / "model")
    found = train("data.seed=17", f"{ROLLOUT}.tensor_model_parallel_size=3")
    assert [
        line
        for line in found
        if line.startswith(f"the run cannot go on from {folder}: data.seed was 1, is 17")
    ]
    assert any(line.startswith(f"{ROLLOUT}.tensor_model_parallel_size=3 ") for line in found)
    (folder / "manifest.json").unlink()  # it is not a checkpoint any more
    assert train("data.seed=17") == []


def test_options_that_the_environment_does_not_take(
    train: Callable[..., list[str]], task: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    turns = f"{ROLLOUT}.multi_turn"
    calculator = (f"{turns}.enable=true", f"{turns}.environment=calculator")
    assert train(*calculator) == []
    (found,) = train(*calculator, f"{turns}.options={{digitz: 3}}")
    assert found.startswith("rollout.multi_turn.options={'digitz': 3}: Calculator(") and "digitz" in found
    (unknown,) = train(f"{turns}.enable=true", f"{turns}.environment=calculatr")
    assert "did you mean calculator" in unknown
    (tmp_path / "room.py").write_text(
        "from megarl.environments.environment import Environment, register_environment\n"
        "@register_environment('preflight.room')\n"
        "class Room(Environment):\n"
        "    def __init__(self, doors): ...\n"
        "    def reset(self, task): ...\n"
        "    def step(self, turn): ...\n"
    )
    own = (f"plugins=[{tmp_path}/room.py]", f"{turns}.enable=true", f"{turns}.environment=preflight.room")
    recipe, *keys = PPO
    assert main(["train", str(REPOSITORY / recipe), *keys, *on(task, tmp_path / "run"), *own]) == 2
    assert "Room(doors) does not take them: missing a required argument: 'doors'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_context_parallelism_on_gpus_needs_transformer_engine(
    train: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
    keys = (
        key,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    )
    before = train(*keys)
    monkeypatch.setattr("megarl.doctor.preflight.gpus_here", lambda: (Gpu("H100", "580", 80 << 30, 0),))
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # as if it were not installed
    (line,) = [problem for problem in train(*keys) if problem not in before]
    assert line.startswith(
        f"{key}: context parallelism on GPUs needs Transformer Engine, which is not installed"
    )


def test_gated_delta_nets_need_their_kernels_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model_config(str(REPOSITORY / "recipes/models/qwen3-next-80b-a3b"))
    there = {"transformer_engine": ModuleType("transformer_engine")}
    monkeypatch.setattr("megarl.doctor.preflight.importlib.util.find_spec", there.get)
    assert list(delta_net_problems(model)) == []  # there is no GPU
    monkeypatch.setattr("megarl.doctor.preflight.gpus_here", lambda: (Gpu("H100", "580", 80 << 30, 0),))
    (line,) = delta_net_problems(model)
    assert (
        line.startswith("qwen3_next: gated delta nets need flash-linear-attention's kernels")
        and "fla-core" in line
    )
    assert list(delta_net_problems(read_model_config(str(REPOSITORY / "recipes/models/qwen3-30b-a3b")))) == []
    there["fla"] = ModuleType("fla")
    assert list(delta_net_problems(model)) == []
