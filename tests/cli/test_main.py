"""Mistakes that users make: one message without a traceback, exit code 2, soon, and before anything is started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.arithmetic import arithmetic_texts, write_arithmetic
from examples.tiny_model import make_tiny_model
from megarl import __version__
from megarl.algorithms.advantages import ESTIMATORS
from megarl.cli.main import RUNNERS, main
from megarl.cluster import RayFailed
from megarl.config import TrainConfig
from megarl.config.loading import SCHEMAS, load_with_origins

ROOT = Path(__file__).resolve().parents[2]
PPO = str(ROOT / "recipes/quickstart_ppo.yaml")
EVAL = str(ROOT / "recipes/quickstart_eval.yaml")
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (4 heads, 2 key/value heads, 2 layers) and data/{sft,train,test}.parquet."""
    folder = tmp_path_factory.mktemp("task")
    write_arithmetic(folder / "data", 64, 128, 8, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=32, ffn_hidden_size=64, num_layers=2)
    return folder


@pytest.fixture
def refuse(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """refuse(command, overrides...): what a command writes to stderr as it ends with exit code 2."""

    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", started)

    def refuse(command: str, *overrides: str) -> str:
        recipe, *paths = {
            "train": [PPO, "data.train_files={}/data/train.parquet", "data.val_files={}/data/test.parquet",
                      "actor_rollout_ref.model.path={}/model"],
            "sft": [str(ROOT / "recipes/quickstart_sft.yaml"), "data.train_files={}/data/sft.parquet",
                    "model.path={}/model"],
            "eval": [str(ROOT / "recipes/quickstart_eval.yaml"), "data.val_files={}/data/test.parquet",
                     "model.path={}/model"],
        }[command]  # fmt: skip
        out = tmp_path / "out"
        arguments = [path.format(task) for path in paths] + [f"trainer.default_local_dir={out}", *overrides]
        assert main([command, recipe, *arguments]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and "Traceback" not in message
        assert not out.exists()
        return message

    return refuse


def megarl(*arguments: str) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_a_mistyped_key_is_answered_at_once() -> None:
    begin = time.monotonic()
    result = megarl("train", PPO, "trainer.total_epoch=2")
    assert time.monotonic() - begin < 30  # 0.2 s on an idle machine
    assert (result.returncode, result.stdout) == (2, "")
    assert "unknown key trainer.total_epoch; did you mean trainer.total_epochs?" in result.stderr
    assert result.stderr.startswith(f"error: configuration {PPO}: 1 problem\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_on_the_way_out_changes_nothing(number: signal.Signals) -> None:
    told = f"atexit.register(os.kill, os.getpid(), {number.value})"
    code = f"import atexit, os, sys; {told}; sys.argv[1:] = ['config', '--reference']; from megarl.cli.main import program; program()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("command", "arguments", "why"),
    [
        ("train", ["train", PPO], "ending before the first step, to be started again"),
        ("train", ["launch", "local", PPO], "ending before the first step, to be started again"),
        ("eval", ["eval", EVAL], "ending, to be started again"),
        ("eval", ["launch", "local", EVAL, "--command", "eval"], "ending, to be started again"),
    ],
)
def test_a_run_that_is_told_to_end_asks_for_another(
    number: signal.Signals,
    command: str,
    arguments: list[str],
    why: str,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its exit code, for which Slurm's script queues the job again."""
    monkeypatch.setitem(RUNNERS, command, lambda options: signal.raise_signal(number))
    before = signal.signal(number, lambda *_: None)  # or the signal would end the tests
    try:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    finally:
        signal.signal(number, before)
    assert ended.value.code == 75 and capfd.readouterr().err == f"{number.name}: {why}\n"


@pytest.mark.parametrize("arguments", [[], ["train"], ["train", PPO, "--fast"]])
def test_a_command_that_is_none_gets_the_usage(arguments) -> None:
    result = megarl(*arguments)
    assert result.returncode == 2 and result.stderr.startswith("usage: megarl ")
    assert "Traceback" not in result.stderr


def test_an_unknown_command_gets_the_one_that_was_meant_or_all(capsys) -> None:
    assert main(["trian", PPO]) == 2
    assert capsys.readouterr().err == "error: megarl has no command 'trian'; did you mean train?\n"
    assert main(["plan", "memry", "recipe:quickstart_ppo"]) == 2
    assert capsys.readouterr().err == "error: megarl plan has no command 'memry'; did you mean memory?\n"
    assert main(["plan", "--help"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "megarl plan sync", "megarl plan memory", "megarl plan step"
    ]  # fmt: skip
    assert main(["plan"]) == 2
    assert "has no command ''; there are sync, memory, step" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert (
        "megarl has no command 'xyz'; there are train, sft, rm, dpo, eval, config, "
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", [[], ["train"], ["sft"], ["rm"], ["dpo"], ["eval"], ["doctor"]])
def test_help_shows_a_command_that_works_and_where_the_keys_are(command, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120 and "docs/config.md" in text
    shown = [line.split("  ")[1].split() for line in text.splitlines() if line.startswith("  megarl ")]
    assert shown, text
    for program, name, *rest in shown:
        schema = {"doctor": "train"}.get(name, name)
        if schema in SCHEMAS and rest not in (
            ["--gpu"],
            ["model", "FOLDER"],
        ):  # the text after the columns of words is the description of the command
            assert program == "megarl" and rest[0].startswith("recipe:")
            load_with_origins(SCHEMAS[schema], rest[0], [word for word in rest[1:] if "=" in word])
        else:
            assert rest in (["outputs/demo"], ["--gpu"], ["model", "FOLDER"])


@pytest.mark.parametrize(("arguments", "code"), [("config --reference", 141), ("--help", 0)])
def test_a_reader_that_stops_is_no_error(arguments: str, code: int) -> None:
    """As `megarl config RECIPE | head` does once it has its lines; 141 is the exit code of a process that SIGPIPE ends."""
    command = f"{sys.executable} -m megarl {arguments} | true; echo ${{PIPESTATUS[0]}}"
    for unbuffered in ("", "1"):  # Python writes at its end, or at once
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        result = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )
        assert (result.stdout, result.stderr) == (f"{code}\n", "")


def test_only_missing_arguments_are_reported_as_missing() -> None:
    assert megarl("train").stderr.endswith("the following arguments are required: recipe\n")


def test_version() -> None:
    result = megarl("--version")
    assert (result.returncode, result.stdout) == (0, f"megarl {__version__}\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "configuration file {} does not exist"),
        (b"data: [", "{} line 1: not valid YAML"),
        (b"\x80\x81", "configuration file {} is no UTF-8 text"),
        (b"- 1\n- 2\n", "configuration file {} must hold a mapping of keys"),
    ],
)
def test_a_recipe_that_is_none(tmp_path, capsys, content, words) -> None:
    recipe = tmp_path / "recipe.yaml"
    if content is not None:
        recipe.write_bytes(content)
    assert main(["train", str(recipe)]) == 2
    assert words.format(recipe) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ACTOR}.clip_ration=0.2", (f"{ACTOR}.clip_ration", f"did you mean {ACTOR}.clip_ratio or")),
        ("algorithm.kl_coef=0.1", ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef")),
        ("trainer.n_gpus_per_node=four", ('trainer.n_gpus_per_node: expected an integer, found "four"',)),
        ("algorithm.adv_estimator=gea", ("algorithm.adv_estimator='gea'", "did you mean gae?")),
        ("algorithm.adv_estimator=ppo", ("algorithm.adv_estimator='ppo'", "did you mean gae?")),
        ("algorithm.adv_estimator=PPO", ("algorithm.adv_estimator='PPO'", "did you mean gae?")),
        (f"{ACTOR}.policy_loss.loss_mode=ppo", ("did you mean vanilla?",)),
        (f"{ACTOR}.megatron.dtype=bf16", ("did you mean bfloat16?",)),
        ("trainer.logger=tb", ("trainer.logger='tb' is unknown", "did you mean tensorboard?")),
        ("actor_rollout_ref.rollout.name=vllm", ("rollout.name=vllm: megarl generates with SGLang: write sglang",)),
        (
            f"{ACTOR}.ppo_mini_batch_size=48",
            (f"{ACTOR}.ppo_mini_batch_size=48 does not divide data.train_batch_size=128",),
        ),
        ("trainer.n_gpus_per_node=3", (f"{ACTOR}.megatron", "needs 4 devices", "3 devices of resource pool")),
        ("custom_reward_function.path=no/such.py", ("custom_reward_function.path: the file no/such.py does not exist",)),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_what_would_be_right(refuse, override, words) -> None:
    message = refuse("train", override)
    assert [word for word in words if word not in message] == [], message


def test_all_problems_come_at_once(refuse) -> None:
    message = refuse(
        "train", "trainer.total_epoch=2", "trainer.n_gpus_per_node=four", f"{ACTOR}.ppo_epochs=1.5"
    )
    assert "3 problems" in message
    for key in ("trainer.total_epochs", "trainer.n_gpus_per_node", f"{ACTOR}.ppo_epochs"):
        assert key in message


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_missing_files(refuse, command) -> None:
    key = {"train": "actor_rollout_ref.model.path", "sft": "model.path", "eval": "model.path"}[command]
    files = "data.val_files" if command == "eval" else "data.train_files"
    message = refuse(command, f"{files}=no/such.parquet", f"{key}=no/such/model")
    assert f"{files}: the file no/such.parquet does not exist (working directory " in message
    assert f"{key}: no/such/model is no folder" in message


def test_a_model_that_tensor_parallelism_does_not_divide(refuse) -> None:
    message = refuse(
        "train", f"{ACTOR}.megatron.tensor_model_parallel_size=4",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=1",
    )  # fmt: skip
    assert (
        f"{ACTOR}.megatron.tensor_model_parallel_size=4 does not divide num_query_groups=2; possible: 1,2"
    ) in message
    message = refuse(
        "sft", "megatron.tensor_model_parallel_size=4", "megatron.pipeline_model_parallel_size=1"
    )
    assert "megatron.tensor_model_parallel_size=4 does not divide num_query_groups=2" in message
    message = refuse("eval", "rollout.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=3")
    assert "rollout.tensor_model_parallel_size=3 does not divide num_attention_heads=4" in message


def test_more_devices_than_the_model_has_layers(refuse) -> None:
    message = refuse("train", f"{ACTOR}.megatron.pipeline_model_parallel_size=4", "trainer.n_gpus_per_node=8")
    assert f"{ACTOR}.megatron.pipeline_model_parallel_size=4 does not divide num_layers=2" in message


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_more_processes_than_cores_can_start(refuse, monkeypatch, command) -> None:
    monkeypatch.setattr("megarl.trainer.run.cluster_setup.gpus_here", lambda: 0)
    many = 32 * len(os.sched_getaffinity(0))
    sizes = {
        "train": [f"data.train_batch_size={many}", f"{ACTOR}.ppo_mini_batch_size={many}"],
        "sft": [f"data.train_batch_size={many}"],
        "eval": [],
    }
    message = refuse(command, f"trainer.n_gpus_per_node={many}", *sizes[command])
    assert (
        f"n_gpus_per_node (or resource_pools) ask for 1 x {many} devices; this machine has no GPU" in message
    )


@pytest.mark.parametrize("command", ["train", "eval"])
def test_responses_longer_than_the_model_can_hold(refuse, command) -> None:
    message = refuse(command, "data.max_response_length=977")
    assert "data.max_prompt_length=48 + data.max_response_length=977 = 1025 tokens do not fit into" in message
    assert "1024 (max_position_embeddings in its config.json)" in message


@pytest.mark.parametrize("command", ["train", "eval"])
def test_data_without_prompts(refuse, task, tmp_path, command) -> None:
    table = pq.read_table(task / "data/train.parquet").drop_columns(["prompt"])
    pq.write_table(table, tmp_path / "bare.parquet")
    files = "data.val_files" if command == "eval" else "data.train_files"
    message = refuse(command, f"{files}={tmp_path}/bare.parquet")
    assert f"{tmp_path}/bare.parquet: no column 'prompt' (columns: data_source, " in message
    assert message.count("bare.parquet") == 1 and "; set data.prompt_key" in message


def test_a_row_without_a_prompt(refuse, task, tmp_path) -> None:
    rows = pq.read_table(task / "data/train.parquet").to_pylist()
    rows[5]["prompt"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "broken.parquet")
    message = refuse("train", f"data.train_files={tmp_path}/broken.parquet")
    assert f"{tmp_path}/broken.parquet row 5: 'prompt' must be a non-empty list" in message


def test_examples_without_answers(refuse, task) -> None:
    message = refuse("sft", "data.response_key=extra_info.solution")
    assert f"{task}/data/sft.parquet row 0: no 'extra_info.solution'" in message
    assert message.count("sft.parquet row") == 1  # only the first wrong row of a file


def test_a_file_that_is_no_parquet(refuse, tmp_path) -> None:
    (tmp_path / "text.parquet").write_text("not Parquet")
    message = refuse("train", f"data.train_files={tmp_path}/text.parquet")
    assert f"data file {tmp_path}/text.parquet is not a valid Parquet file" in message


def test_fewer_prompts_than_a_batch(refuse) -> None:
    message = refuse("train", "data.train_batch_size=256")
    assert (
        "data.train_files: 128 rows, too few for one batch of data.train_batch_size=256: lower it" in message
    )


def test_a_data_source_without_a_reward(refuse, task, tmp_path) -> None:
    table = pq.read_table(task / "data/train.parquet").drop_columns(["data_source"])
    table = table.append_column("data_source", pa.array(["mine"] * table.num_rows))
    pq.write_table(table, tmp_path / "mine.parquet")
    message = refuse("train", f"data.train_files={tmp_path}/mine.parquet")
    assert "no reward rule for data_source 'mine'" in message and "custom_reward_function.path" in message


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_a_model_without_a_tokenizer(refuse, task, tmp_path, command) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((task / "model" / name).read_bytes())
    key = "actor_rollout_ref.model.path" if command == "train" else "model.path"
    assert f"folder {tmp_path} holds no tokenizer" in refuse(command, f"{key}={tmp_path}")


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_a_model_without_weights_or_a_part_of_them(refuse, task, tmp_path, command) -> None:
    for file in (task / "model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    key = "actor_rollout_ref.model.path" if command == "train" else "model.path"
    assert f"model folder '{tmp_path}' holds no model.safetensors" in refuse(command, f"{key}={tmp_path}")
    weights = (task / "model" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    message = refuse(command, f"{key}={tmp_path}")
    assert f"{tmp_path}/model.safetensors is no complete safetensors file" in message


def test_weights_of_another_model(refuse, task, tmp_path) -> None:
    for file in (task / "model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 4'))
    message = refuse("train", f"critic.model.path={tmp_path}")
    assert f"checkpoint {tmp_path} does not fit its config: model.layers.2" in message


def test_a_model_family_that_megarl_does_not_have(refuse, task, tmp_path) -> None:
    text = (task / "model" / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"qwen2"', '"mamba"'))
    message = refuse("train", f"actor_rollout_ref.model.path={tmp_path}")
    assert "model_type 'mamba' is not supported without its weights" in message
    assert "supported: deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa, gpt_oss" in message


def test_a_reward_file_that_cannot_be_imported(refuse, tmp_path) -> None:
    (tmp_path / "reward.py").write_text("import no_such_package\n")
    message = refuse("train", f"custom_reward_function.path={tmp_path}/reward.py")
    assert "importing it failed with ModuleNotFoundError: No module named 'no_such_package'" in message


def test_verify_asks_nobody_for_a_folder_that_is_not_there(task, capsys) -> None:
    assert main(["verify", "no/such/model", "no/such.parquet"]) == 2
    assert "model path 'no/such/model' is not a folder" in capsys.readouterr().err
    assert main(["verify", str(task / "model"), "no/such.parquet"]) == 2
    assert "trajectory file no/such.parquet does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--hidden-size=7", "--num-layers=0", "--max-operand=0", "--teacher-errors=2"]
)
def test_a_task_that_cannot_be_made(tmp_path, capsys, option) -> None:
    assert main(["make-task", str(tmp_path / "task"), option]) == 2
    name = option.removeprefix("--").partition("=")[0].replace("-", "_")
    assert f"error: {name}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(capsys) -> None:
    """The machine is at fault, not the user's text: exit code 1."""
    assert main(["make-task", "/proc/task"]) == 1
    assert "/proc/task" in capsys.readouterr().err


def test_overrides_alone_need_no_recipe(capsys) -> None:
    """verl is started in this way; `+key` and `++key` are Hydra's."""
    assert main(["train", "++data.train_batch_size=8", "+trainer.total_epochs=1"]) == 2
    message = capsys.readouterr().err
    assert "data.train_batch_size" not in message and "trainer.total_epochs" not in message
    assert "data.max_prompt_length is required" in message


def test_several_copies_by_torchrun_are_refused(refuse, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = "run it once, without torchrun; trainer.nnodes and trainer.n_gpus_per_node say how many"
    assert words in refuse("train")


def test_notes_and_plugins_come_before_the_run(refuse, task, tmp_path, capsys, monkeypatch) -> None:
    """A name that a plugin adds is known; one that neither megarl nor the plugin has is not."""
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))  # other tests do not see the name
    (tmp_path / "mine.py").write_text(
        "from megarl.algorithms.advantages import ESTIMATORS\n\n"
        "@ESTIMATORS.register('cli_test_estimator')\n"
        "def estimate(batch, options):\n    raise AssertionError('not reached')\n"
    )
    plugin = [f"plugins=[{tmp_path}/mine.py]", "critic=null"]
    message = refuse("train", *plugin, "algorithm.adv_estimator=cli_test_estimator2")
    assert "cli_test_estimator2" in message and "cli_test_estimator" in message.replace("estimator2", "")
    message = refuse(
        "train", *plugin, "algorithm.adv_estimator=cli_test_estimator", "data.max_prompt_length=1"
    )
    assert "cli_test_estimator" not in message  # the next check fails: the prompts are too long
    (tmp_path / "bad.py").write_text("1 / 0\n")
    assert "importing it failed with ZeroDivisionError" in refuse("train", f"plugins=[{tmp_path}/bad.py]")


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "megarl", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, f"megarl {__version__}\n")


@pytest.mark.parametrize("losses", [0, 2])
def test_training_alone_is_started_again_too(monkeypatch, tmp_path, losses) -> None:
    """`trainer.max_restarts` counts for `trainer.train_only`, which goes on from its checkpoints as any training does."""
    keys = [
        f"trainer.train_only={tmp_path}",
        "trainer.max_restarts=2",
        f"trainer.default_local_dir={tmp_path}",
    ]
    config, _ = load_with_origins(TrainConfig, PPO, keys)
    begun: list[object] = []

    def learn(config: TrainConfig, cluster_setup: object) -> str:
        begun.append(cluster_setup)
        if len(begun) <= losses:
            raise RayFailed("the raylet is gone")
        return "hf"

    monkeypatch.setattr("megarl.cli.main._configured", lambda *_: config)
    monkeypatch.setattr("megarl.trainer.run.cluster_setup.cluster_setup_of", lambda _: nullcontext("first"))
    monkeypatch.setattr("megarl.trainer.loops.offline.learn_only", learn)
    assert main(["train", PPO]) == 0
    assert begun == ["first", *[None] * losses]
