"""Rules for the complete repository: which rooms may import which, which imports stay light, which pins must agree."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.sources import PACKAGE, ROOT, modules, source_of

MAX_LINES = 700
SCREEN = 60  # lines
AT_THE_TOP = {
    *("benchmarks", "docs", "examples", "launch", "megarl", "recipes", "requirements", "tests", "tools"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", "LICENSE", "Makefile", "README.md"),
    *("mkdocs.yml", "pyproject.toml", "setup.py"),
}

# docs/architecture.md shows the same table to readers. A room imports only from rooms on floors below its own; a folder within a room
# that has no floor of its own belongs to it.
FLOORS = {
    "util": 0,
    "util/rendezvous": 1,
    "util/gloo": 0,
    "config": 1,
    "platform": 1,
    "algorithms": 2,
    "checkpoints": 2,
    "cluster": 2,
    "data": 2,
    "environments": 2,
    "launch": 2,
    "layout": 2,
    "rewards": 2,
    "sglang_cpu": 2,
    "checkpoints/dcp": 3,
    "models": 3,
    "rollout": 3,
    "gateway": 4,
    "megatron": 4,
    "weight_sync": 4,
    "checkpoints/hf": 5,
    "costs": 5,
    "rollout/sglang": 5,
    "checkpoints/convert": 6,
    "gateway/serve": 6,
    "trainer/workers": 6,
    "trainer/run": 7,
    "trainer/roles": 8,
    "trainer/stages": 9,
    "trainer/health": 10,
    "trainer/schedule": 10,
    "doctor": 10,
    "trainer/loops": 11,
    "report": 11,
    "api": 12,
    "plan": 12,
    "shadow": 13,
    "gpu_test": 14,
    "cli": 15,
    "__main__": 16,
}
HEAVY = {"torch", "transformers", "ray", "megatron", "sglang"}
# Packages that a room must not import, wherever in a file the import stands.
FORBIDDEN = {
    "util": HEAVY,
    "util/rendezvous": {"transformers", "ray", "megatron", "sglang"},
    "util/gloo": {"transformers", "ray", "megatron", "sglang"},
    "config": HEAVY,
    "platform": {"transformers", "ray", "sglang"},
    "algorithms": {"transformers", "ray", "megatron", "sglang"},
    "checkpoints": HEAVY,
    "checkpoints/dcp": {"transformers", "ray", "megatron", "sglang"},
    "checkpoints/hf": {"ray"},
    "checkpoints/convert": {"ray"},
    "cluster": {"megatron", "sglang"},
    "data": {"ray", "megatron", "sglang"},
    "environments": HEAVY,
    "launch": HEAVY,
    "layout": HEAVY,
    "rewards": {"ray", "megatron", "sglang"},
    "sglang_cpu": {"ray", "megatron"},
    "models": {"ray", "megatron", "sglang"},
    "rollout": {"ray", "megatron"},
    "gateway": {"ray", "megatron"},
    "gateway/serve": {"ray", "megatron"},
    "rollout/sglang": {"ray", "megatron"},
    "megatron": {"ray", "sglang"},
    "weight_sync": {"ray"},
    "report": HEAVY,
    "cli": HEAVY,
}
MOST_FILES = 25  # of a folder


def room_of(path: Path) -> str:
    """ "data" for megarl/data/files.py, "trainer/run" for megarl/trainer/run/logger.py, "__init__" for megarl/__init__.py."""
    return _room(path.relative_to(PACKAGE).with_suffix("").parts)


def _room(parts: Sequence[str]) -> str:
    names = ("/".join(parts[:depth]) for depth in (2, 1))
    return next((name for name in names if name in FLOORS), parts[0])


def room_imported(name: str) -> str | None:
    """The room of "megarl.<room>..."; None: another package, or a name that megarl itself defines."""
    parts = name.split(".")
    if parts[0] != "megarl" or len(parts) == 1 or parts[1] == "__version__":
        return None
    return _room(parts[1:])


def test_trackers_are_imported_by_the_name_that_a_configuration_has() -> None:
    """Never by an import statement, so that trackers without such a name are not loaded."""
    imported = {name.split(".")[0] for path in modules() for _, name in source_of(path).imports}
    assert not imported & {"wandb", "mlflow", "swanlab", "trackio"}
    assert "rich" in imported  # else this test checks nothing


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in modules()} - {"__init__", "trainer"}
    assert rooms <= set(FLOORS)


def test_rooms_import_only_from_floors_below() -> None:
    wrong, seen = [], set()
    for path in modules():
        room = room_of(path)
        for line, name in source_of(path).imports:
            target = room_imported(name)
            if target is None or target == room:
                continue
            seen.add((room, target))
            if FLOORS.get(target, 99) >= FLOORS.get(room, -1):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []
    assert ("trainer/run", "cluster") in seen  # else this test checks nothing


def test_the_stand_ins_for_sglangs_kernels_are_reached_by_entry_points_alone() -> None:
    imported = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for line, name in source_of(path).imports
        if room_imported(name) == "sglang_cpu" and room_of(path) != "sglang_cpu"
    ]
    assert imported == []
    named = re.findall(r"megarl\.(sglang_cpu\.\w+):(\w+)", (ROOT / "setup.py").read_text())
    assert len(named) == 4
    for module, function in named:
        text = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}() -> " in text, (module, function)


def test_rooms_do_not_import_what_they_must_not_know() -> None:
    wrong, seen = [], set()
    for path in modules():
        for line, name in source_of(path).imports:
            top = name.split(".")[0]
            seen.add((room_of(path), top))
            if top in FORBIDDEN.get(room_of(path), set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []
    assert {("cluster", "ray"), ("megatron", "megatron"), ("rollout/sglang", "sglang")} <= seen


def test_nothing_else_lies_at_the_top() -> None:
    """Files that a command has left there would come into a commit: remove them. .gitignore has outputs/."""
    ignored = [".*", *(name.rstrip("/") for name in (ROOT / ".gitignore").read_text().split())]
    names = {path.name for path in ROOT.iterdir()}
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in ignored)} == AT_THE_TOP


def test_files_are_short() -> None:
    files = [
        file
        for folder in ("megarl", "tests", "tools", "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*.py")
    ]
    counts = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: count for name, count in counts.items() if count > MAX_LINES} == {}


def test_a_loop_fits_a_screen() -> None:
    files = sorted((PACKAGE / "trainer" / "loops").glob("*.py"))
    functions = [
        (f"{file.name}: {name}", lines) for file in files for name, lines in source_of(file).functions
    ]
    assert len(functions) > 20  # else this test checks nothing
    assert {name: lines for name, lines in functions if lines > SCREEN} == {}


def test_no_folder_is_crowded() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules())
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_imports_are_circular() -> None:
    """Imports within functions and under TYPE_CHECKING count, too."""
    paths = {module_of(path): path for path in modules()}
    imported = {
        name: {_module(target, paths) for _, target in source_of(path).imports} - {None, name}
        for name, path in paths.items()
    }
    assert len(imported["megarl.trainer.run.run"]) > 5  # else this test checks nothing
    while leaves := [name for name, targets in imported.items() if not targets]:
        for name in leaves:
            del imported[name]
        for targets in imported.values():
            targets.difference_update(leaves)
    assert imported == {}


def _module(name: str, modules: Container[str]) -> str | None:
    """The module that an imported name is, or belongs to; None: a name of another package."""
    return next((found for found in (name, name.rpartition(".")[0]) if found in modules), None)


def loaded_by(names: list[str], packages: set[str]) -> str:
    """The packages among `packages` that a new Python process has loaded once it has imported the modules `names`."""
    code = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name.removesuffix('.__init__'))\n"
        f"print(sorted({packages} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400
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
    """A mistake in the run is reported within a second or two."""
    assert loaded_by(["megarl.doctor.preflight"], HEAVY) == "[]"


def test_controller_loads_neither_megatron_nor_sglang_nor_a_compiler() -> None:
    loops = [f"megarl.trainer.loops.{name}" for name in ("ppo", "sft", "rm", "dpo", "evaluate")]
    assert loaded_by(loops, {"megatron", "sglang", "torch._dynamo"}) == "[]"


def test_ranks_load_no_transformers() -> None:
    """transformers would cost each rank a second and a half of a core at its start."""
    workers = [f"megarl.trainer.workers.{name}" for name in ("actor", "scalar_heads", "supervised")]
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
    rows = re.findall(r"^\| (\d+) \| `megarl/(\w+(?:/\w+)?)(?:/|\.py)` \|", page, re.MULTILINE)
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


# Words that docs/glossary.md replaces by the field's. A trailing or leading underscore, upper case and word breaks do not count.
BANNED_PARTS = {"blame", "dumped", "halves", "nursery", "nurseries", "parcel", "premises", "under_way"}
BANNED_NAMES = {"beside", "foreign", "garbage", "kinds", "tuning"}  # of modules, classes and functions
BANNED_MODULES = {"texts"}
BANNED_CLASSES = {"asked", "cut", "held", "line", "look", "pair", "seen", "sending", "whole"}
# The two halves of a head that rotary embeddings turn are called so everywhere.
ROTARY = {
    "rotates_halves",
    "turns_halves",
    "test_interleaved_pairs_are_put_in_halves_and_scaled",
}


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def is_banned(kind: str, name: str) -> bool:
    """`kind`: "module", "class" or "function"."""
    name = snake_case(name)
    plain = name.removeprefix("test_") if kind == "module" else name
    whole_names = BANNED_NAMES | {"module": BANNED_MODULES, "class": BANNED_CLASSES}.get(kind, set())
    return plain in whole_names or any(f"_{part}_" in f"_{name}_" for part in BANNED_PARTS)


DEFINITION = re.compile(r"^\s*(?:async\s+)?(def|class)\s+(\w+)\s*[(:\[]", re.MULTILINE)


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    """(kind, name) of a module, or of the folder that it makes a package, and of its definitions, also of those in code that it writes."""
    yield "module", path.parent.name if path.name == "__init__.py" else path.stem
    for keyword, name in DEFINITION.findall(path.read_text()):
        yield "class" if keyword == "class" else "function", name


def test_names_are_the_words_of_the_glossary() -> None:
    """docs/glossary.md says which words are not used and what takes their place."""
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*modules(), *sorted((ROOT / "tests").rglob("*.py")))
        for kind, name in names_of(path)
        if is_banned(kind, name) and name not in ROTARY
    }
    assert found == set()


def test_the_glossary_has_every_banned_word() -> None:
    _, _, table = (ROOT / "docs/glossary.md").read_text().partition("## Words that are not used")
    said = {
        word.lower()
        for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for word in re.findall(r"\w+", row)
    }
    banned = BANNED_PARTS | BANNED_NAMES | BANNED_MODULES | BANNED_CLASSES
    assert {word for part in banned - {"nurseries"} for word in part.split("_")} <= said
