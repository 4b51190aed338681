"""Every recipe: its header is true, its configuration is valid, and by its plan it fits on its GPUs, if it runs on GPUs."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config import TrainConfig, resolve, to_dict
from megarl.config.loading import SCHEMAS, load_config
from megarl.models import logical_tensors, read_model_config
from megarl.plan.sync import configured_sync

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
# Parameters in billions, as published with the models.
SIZES = {
    "deepseek-llm-7b": 6.91,
    "deepseek-v3": 671.0,
    "deepseek-v3.2": 671.9,  # as DeepSeek-V3, with 61 indexers of 14 million
    "glm-4.7": 352.8,  # 358.3 with the layer for MTP, and the embedding and head that it repeats
    "glm-5": 744.0,
    "gpt-oss-120b": 116.8,
    "llama-3-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.2-3b": 3.21,
    "minimax-m2": 229.0,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-72b": 72.7,
    "qwen2.5-7b": 7.62,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
    "qwen3-4b": 4.0,
    "qwen3.5-397b-a17b": 396.3,  # without the vision tower
    "qwen3-next-80b-a3b": 79.7,  # 81.3 with the layer for MTP
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the repository's root: the paths of this file are relative to it."""
    monkeypatch.chdir(ROOT)


def header(recipe: str) -> str:
    """The recipe's first comment, in one line."""
    lines = (ROOT / f"recipes/{recipe}.yaml").read_text().splitlines()
    length = next(row for row, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:length])


ON_GPUS = [name for name in RECIPES if re.search(r"Hardware: [^.]* GPUs? of \d+ GB", header(name))]


def report(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_header_names_hardware_and_the_command(recipe: str) -> None:
    text = header(recipe)
    assert "Hardware: " in text
    command = re.search(r"Run: +megarl (\w+) recipe:(\S+)", text)
    assert command is not None and command[2] == recipe
    assert resolve(load_config(SCHEMAS[command[1]], f"recipes/{recipe}.yaml"))


def named_paths(section: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of files and folders that a recipe reads, and their paths; without the folders that it writes."""
    if isinstance(section, dict):
        for name, value in section.items():
            yield from named_paths(value, f"{prefix}.{name}" if prefix else name)
    elif prefix.rpartition(".")[2] in ("path", "files", "train_files", "val_files", "normalize_files"):
        yield from ((prefix, path) for path in ([section] if isinstance(section, str) else section or []))


def written_before(recipe: str) -> set[str]:
    """The folders of the commands that the header puts before the recipe, and of the commands before those."""
    before = header(recipe).partition("Before: ")[2].partition("Run: ")[0]
    folders = set(re.findall(r"(?:make-task|--out) (\S+)", before))
    return folders.union(*map(written_before, re.findall(r"recipe:(\w+)", before)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_it_reads_is_here_or_made_or_to_be_named(recipe: str) -> None:
    """The header has this repository's commands that make the inputs, or says which key names an input."""
    command = re.search(r"Run: +megarl (\w+) ", header(recipe))[1]
    config = to_dict(load_config(SCHEMAS[command], f"recipes/{recipe}.yaml"))
    paths = dict(named_paths(config))
    assert len(paths) >= 2
    for key, path in paths.items():
        assert ".." not in Path(path).parts
        is_made = any(
            Path(path).is_relative_to(Path(folder).expanduser()) for folder in written_before(recipe)
        )
        is_whole = Path(path).is_file()
        assert is_made or is_whole or key in header(recipe), f"{key}={path}"


@pytest.mark.parametrize("recipe", ON_GPUS)
def test_it_fits_with_the_memory_that_its_header_says(recipe: str, capsys: pytest.CaptureFixture) -> None:
    text = header(recipe)
    nodes, gpus, memory = re.search(
        r"Hardware: (?:(one|two|\d+) nodes? of 8 GPUs|(one) GPU) of (\d+) GB", text
    ).groups()
    config = resolve(load_config(TrainConfig, f"recipes/{recipe}.yaml"))
    numbers = {"one": 1, "two": 2}
    assert config.trainer.nnodes == (1 if gpus else numbers.get(nodes) or int(nodes))
    assert config.trainer.n_gpus_per_node == (1 if gpus else 8)
    plan = report(capsys, "plan", "memory", f"recipes/{recipe}.yaml", "--gpu-memory", str(int(memory) - 1))
    assert plan["fits"] and not plan["problems"]
    planned = {phase: terms["total"] / 2**30 for phase, terms in plan["phases"].items()}
    told = dict(
        re.findall(r"(\w+) (\d+\.\d)[,.;]", text.split("`megarl plan memory`")[1].split("Before:")[0])
    )
    assert {phase: f"{value:.1f}" for phase, value in planned.items()} == {
        name: told.get(name) for name in planned
    }


LARGE = (  # their complete sync takes longest to plan
    "qwen3_next_80b_a3b_grpo",
    "qwen3_30b_a3b_grpo",
    "qwen3_30b_a3b_grpo_fp8",
    "deepseek_v3_grpo_lora",
    "deepseek_v3_grpo_fp8",
    "qwen3.5_397b_a17b_grpo",
    "qwen3_30b_a3b_distillation",
    "deepseek_v3_grpo",
    "deepseek_v3_grpo_256x80gb",
    "deepseek_v3_grpo_512x80gb",
    "deepseek_v3_grpo_96x96gb",
    "deepseek_v3_grpo_96x96gb_async",
    "deepseek_v3.2_grpo",
    "glm_4.7_grpo",
    "glm_5_grpo",
    "minimax_m2_grpo",
    "qwen3_235b_a22b_grpo",
    "gpt_oss_120b_grpo",
    "qwen3_30b_a3b_grpo_async",
)


@pytest.mark.parametrize(
    "recipe",
    [
        # GSPO's sync is that of the recipe that it is based on.
        pytest.param(name, marks=pytest.mark.slow) if name in (*LARGE, "qwen3_30b_a3b_gspo") else name
        for name in ON_GPUS
    ],
)
def test_its_weight_sync_is_planned(recipe: str, capsys: pytest.CaptureFixture) -> None:
    plan = report(capsys, "plan", "sync", f"recipes/{recipe}.yaml")
    assert plan["reshard"]["max_received"] <= plan["full_gather"]["max_received"]
    alone = "single_gpu" in recipe
    assert (plan["full_gather"]["max_received"] == 0) == alone
    # There is a communicator, in which a process talks to few of the others.
    average, most = plan["peers"]
    assert plan["communicators"] == (most > 0) and (most == 0 or not alone)
    assert average <= 80 and most <= 100


# Other recipes have the model and the kinds of layouts of these.
ALIKE = (
    "deepseek_v3_grpo",
    "deepseek_v3_grpo_256x80gb",
    "deepseek_v3_grpo_96x96gb",
    "qwen3_30b_a3b_distillation",
)


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in LARGE]
)
def test_shares_of_its_weight_sync_are_planned(recipe: str) -> None:
    """The shares of the last engine rank, and of the first trainer rank that it gets something from: each planned by itself, as ranks do."""
    config = resolve(load_config(TrainConfig, f"recipes/{recipe}.yaml"))
    policy = config.actor_rollout_ref
    sync = configured_sync(config, read_model_config(policy.model.path), policy.rollout)
    plan = sync.plan
    last = plan.target.num_ranks - 1
    gets = plan.copies_to(last)
    served = [piece for shard in plan.target.shards_of[last] for piece in plan.target.shards[shard].pieces]
    assert sum(map(plan.bytes_of, gets)) == sum(
        piece.box.numel * plan.itemsize(piece.tensor) for piece in served
    )
    sender = min(copy.source_rank for copy in gets)
    sends = replace(plan).deliveries_from(sender)  # this plan has the shards, but no copies yet
    assert [one.box for one in sends if last in one.target_ranks] == [
        copy.box for copy in gets if copy.source_rank == sender
    ]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "recipes/models").iterdir()))
def test_a_models_config_has_the_parameters_that_are_published(name: str) -> None:
    config = read_model_config(f"recipes/models/{name}")
    parameters = sum(map(prod, logical_tensors(config).values()))
    assert parameters / 1e9 == pytest.approx(SIZES[name], rel=6e-3)
