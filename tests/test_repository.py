"""What holds for the repository as a whole: who may import whom, what stays light, which pins must agree."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megarl"
MAX_LINES = 400

# docs/architecture.md shows the same table to readers. A room imports only from rooms on floors below its own.
FLOORS = {
    "files": 0,
    "freed_memory": 0,
    "imports": 0,
    "nccl": 0,
    "packages": 1,
    "plugins": 0,
    "shipped": 0,
    "signals": 0,
    "spans": 0,
    "checkpoints": 1,
    "config": 1,
    "platform": 1,
    "rendezvous": 1,
    "data": 2,
    "algorithms": 2,
    "environments": 2,
    "rewards": 2,
    "layout": 2,
    "launch": 2,
    "dcp": 3,
    "models": 3,
    "megatron": 4,
    "rollout": 4,
    "hybrid_engine": 5,
    "cluster": 6,
    "memory": 6,
    "trainer": 7,
    "shadow": 9,
    "report": 8,
    "gpu_test": 10,
    "cli": 11,
    "__main__": 12,
}
HEAVY = {"torch", "transformers", "ray", "megatron", "sglang"}
# What a room must not know, wherever in a file the import stands.
FORBIDDEN = {
    "checkpoints": HEAVY,
    "config": HEAVY,
    "platform": {"transformers", "ray", "sglang"},
    "rendezvous": {"transformers", "ray", "megatron", "sglang"},
    "files": HEAVY,
    "freed_memory": HEAVY,
    "imports": HEAVY,
    "nccl": HEAVY,
    "packages": HEAVY,
    "plugins": HEAVY,
    "shipped": HEAVY,
    "signals": HEAVY,
    "spans": HEAVY,
    "data": {"ray", "megatron", "sglang"},
    "algorithms": {"transformers", "ray", "megatron", "sglang"},
    "environments": HEAVY,
    "rewards": {"ray", "megatron", "sglang"},
    "layout": HEAVY,
    "launch": HEAVY,
    "dcp": {"transformers", "ray", "megatron", "sglang"},
    "models": {"ray", "megatron", "sglang"},
    "megatron": {"ray", "sglang"},
    "rollout": {"ray", "megatron"},
    "hybrid_engine": {"ray"},
    "cluster": {"megatron", "sglang"},
    "report": HEAVY,
    "cli": HEAVY,
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """ "data" for megarl/data/files.py, "cli" for megarl/cli.py, "__init__" for megarl/__init__.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, inside functions and under TYPE_CHECKING too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def room_imported(name: str) -> str | None:
    """The room of "megarl.<room>..."; None for other packages and for what megarl itself defines."""
    parts = name.split(".")
    if parts[0] != "megarl" or len(parts) == 1 or parts[1] == "__version__":
        return None
    return parts[1]


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in modules()} - {"__init__"}
    assert rooms <= set(FLOORS)


def test_rooms_import_only_from_floors_below() -> None:
    wrong, seen = [], set()
    for path in modules():
        room = room_of(path)
        for line, name in imports_of(path):
            target = room_imported(name)
            if target is None or target == room:
                continue
            seen.add((room, target))
            if FLOORS.get(target, 99) >= FLOORS.get(room, -1):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []
    assert ("trainer", "cluster") in seen  # or this test has not looked


def test_rooms_do_not_import_what_they_must_not_know() -> None:
    wrong, seen = [], set()
    for path in modules():
        for line, name in imports_of(path):
            top = name.split(".")[0]
            seen.add((room_of(path), top))
            if top in FORBIDDEN.get(room_of(path), set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []
    assert {("cluster", "ray"), ("megatron", "megatron"), ("rollout", "sglang")} <= seen


def test_files_are_short() -> None:
    files = [
        file
        for folder in ("megarl", "tests", "tools", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ]
    counts = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: count for name, count in counts.items() if count > MAX_LINES} == {}


def loaded_by(names: list[str], packages: set[str]) -> str:
    """Which of `packages` a new Python process has loaded once it has imported the modules `names`."""
    code = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name.removesuffix('.__init__'))\n"
        f"print(sorted({packages} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("room", ["__init__", "config", "layout", "cli"])
def test_import_is_light(room: str) -> None:
    """`import megarl`, planning, and refusing a wrong configuration need none of the heavy packages."""
    paths = [path for path in modules() if room_of(path) == room]
    assert (
        loaded_by([".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths], HEAVY) == "[]"
    )


def test_a_run_is_checked_before_anything_heavy_is_loaded() -> None:
    """So that a mistake in it is told within a second or two."""
    assert loaded_by(["megarl.trainer.preflight"], HEAVY) == "[]"


def test_controller_loads_neither_megatron_nor_sglang() -> None:
    loops = [f"megarl.trainer.{name}" for name in ("ppo", "sft", "rm", "dpo", "evaluate")]
    assert loaded_by(loops, {"megatron", "sglang"}) == "[]"


def test_ranks_load_no_transformers() -> None:
    """It would cost each of them a second and a half of a core at its start."""
    workers = [
        f"megarl.trainer.{name}"
        for name in ("actor", "critic", "sft_worker", "rm_worker", "dpo_worker", "reward_worker")
    ]
    assert loaded_by(workers, {"transformers", "sglang", "torch._dynamo"}) == "[]"


def test_architecture_page_lists_every_module_and_no_other() -> None:
    rows = re.findall(
        r"^\| `(megarl/\S+\.py)` \| \S.*\|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
    )
    present = [str(path.relative_to(ROOT)) for path in modules()]
    assert sorted(set(present) - set(rows)) == []
    assert sorted(set(rows) - set(present)) == []
    assert len(rows) == len(set(rows))


def test_architecture_page_has_the_floors_of_this_test() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `megarl/(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    floors = {
        room: floor
        for room, floor in FLOORS.items()
        if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()
    }
    assert {room: int(floor) for floor, room in rows} == floors


def pins(name: str) -> dict[str, str]:
    """Package -> version of a requirements file; names in their normal form (PEP 503)."""
    found = re.findall(
        r"^([\w.-]+)(?:\[.*\])?==(\S+)$", (ROOT / "requirements" / name).read_text(), re.MULTILINE
    )
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_gpu_image_runs_the_versions_that_are_tested() -> None:
    gpu, tested = pins("gpu.txt"), pins("runtime.txt") | pins("cpu.txt")
    assert len(gpu) > len(tested) > 50
    different = {name for name, version in tested.items() if gpu.get(name) != version}
    assert different == {"numpy"}  # one of SGLang's own requirements asks for an older one


def test_dockerfile_and_setup_name_the_pins_of_the_gpu_image() -> None:
    gpu = pins("gpu.txt")
    args = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert {
        "torch": args["TORCH_VERSION"],
        "transformer-engine": args["TE_VERSION"],
        "sglang": args["SGLANG_VERSION"],
        "megatron-core": args["MEGATRON_CORE_VERSION"],
    }.items() <= gpu.items()
    assert re.fullmatch(r"[0-9a-f]{40}", args["APEX_COMMIT"])
    pinned = re.findall(r'^    "([\w.-]+)==([^";]+)', (ROOT / "setup.py").read_text(), re.MULTILINE)
    core = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned}
    assert "megatron-core" in core
    assert {name: version for name, version in core.items() if gpu.get(name) != version} == {}
    assert pins("gpu.in").items() <= gpu.items()
