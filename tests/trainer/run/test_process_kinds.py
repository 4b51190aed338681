"""What the processes of a run have imported when they begin, in real fork servers."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.fork_server import interpreter
from megarl.config import EvalConfig, SFTConfig, TrainConfig, load_config, resolve
from megarl.trainer.run.process_kinds import ENGINE, MODEL, cluster_setup_of

RECIPES = Path(__file__).parents[3] / "recipes"
TRAIN = resolve(load_config(TrainConfig, RECIPES / "quickstart_ppo.yaml", []))
SFT = resolve(load_config(SFTConfig, RECIPES / "quickstart_sft.yaml", []))
EVAL = resolve(load_config(EvalConfig, RECIPES / "quickstart_eval.yaml", []))
LIST = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def test_a_run_has_fork_servers_for_what_it_starts():
    for config, kinds in ((TRAIN, {MODEL, ENGINE}), (SFT, {MODEL}), (EVAL, {ENGINE})):
        with cluster_setup_of(config) as cluster_setup:
            assert cluster_setup.fork_servers.keys() == kinds
        joins = replace(config, trainer=replace(config.trainer, ray_address="10.0.0.1:6379"))
        with cluster_setup_of(joins) as cluster_setup:
            assert cluster_setup is None
    learns = replace(TRAIN, trainer=replace(TRAIN.trainer, train_only="somewhere"))
    with cluster_setup_of(learns) as cluster_setup:
        assert cluster_setup.fork_servers.keys() == {MODEL}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules that a copy of each kind begins with."""
    script = tmp_path_factory.mktemp("kinds") / "script.py"
    script.write_text(LIST)
    with cluster_setup_of(TRAIN) as cluster_setup:
        # One after the other: an asker waits 30 s.
        return {kind: copy_of(cluster_setup.fork_servers[kind], script) for kind in (MODEL, ENGINE)}


def copy_of(fork_server: str, script: Path) -> set[str]:
    command = f"exec {interpreter(fork_server)} {script}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_models_and_engines_begin_with_what_takes_long(imported):
    assert {"torch", "megatron.core.models.gpt", "megarl.megatron.build"} <= imported[MODEL]
    assert {"torch", "sglang.srt.entrypoints.engine", "megarl.rollout.sglang.process"} <= imported[ENGINE]


def test_nothing_is_imported_before_it_may_be(imported):
    for kind, modules in imported.items():
        assert "ray" not in modules, f"{kind}: it would have the settings of no worker"
    assert "megatron.core" not in imported[ENGINE], (
        "SGLang's schedulers refuse what it makes of pickled tensors"
    )
    assert not any(name.split(".")[0] == "sglang" for name in imported[MODEL])
