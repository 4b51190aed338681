"""The frameworks: what is installed for each, and the command that trains the common task.

The micro-batching is the same for all: one optimizer step on the 128 trajectories of a step, in one micro-batch (megarl's two
data parallel ranks have half of it each). Peers run as their authors ship them, with two threads; verl is edited where it does
not run on a CPU (`verl_on_cpu.py`). benchmarks/README.md lists the differences.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from task import LEARNING_RATE, NUM_PROMPTS, RESPONSE_TOKENS, SAMPLES

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TORCH = "torch==2.13.0"
TRL = (TORCH, "transformers==5.12.1", "accelerate==1.15.0", "datasets==5.0.1")
BATCH = NUM_PROMPTS * SAMPLES


@dataclass(frozen=True)
class Framework:
    """One framework with one algorithm.

    Attributes:
        name, algorithm: such as "trl", "grpo".
        environment: the folder of its virtual environment; None: megarl's own, that of this process.
        packages: what pip installs there, with its dependencies.
        alone: then this, without.
        prepare: a script of this folder that its Python runs then.
        reported: packages whose versions are noted.
    """

    name: str
    algorithm: str
    environment: str | None
    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    prepare: str | None = None
    reported: tuple[str, ...] = ("torch", "transformers")

    @property
    def label(self) -> str:
        return f"{self.name} {self.algorithm}"


def frameworks() -> list[Framework]:
    """In the order in which they take turns."""
    verl_packages = tuple((HERE / "verl_requirements.txt").read_text().split())
    found = []
    for algorithm in ("grpo", "ppo"):
        trl = "trl==1.16.0" if algorithm == "grpo" else "trl==1.12.0"
        found += [
            Framework(
                "megarl",
                algorithm,
                None,
                reported=("torch", "megatron-core", "sglang", "ray", "transformers"),
            ),
            Framework(
                "trl",
                algorithm,
                f"trl_{algorithm}",
                (*TRL, trl),
                reported=("trl", "torch", "transformers", "accelerate"),
            ),
            Framework(
                "verl",
                algorithm,
                "verl",
                verl_packages,
                ("verl==0.5.0",),
                "verl_on_cpu.py",
                ("verl", "torch", "transformers", "ray", "tensordict"),
            ),
        ]
    return found


def python_of(framework: Framework, root: Path) -> Path:
    """The interpreter that runs it."""
    if framework.environment is None:
        return Path(sys.executable)
    return root / "venvs" / framework.environment / "bin" / "python"


def command(framework: Framework, root: Path, task: Path, steps: int, out: Path) -> list[str]:
    """The command that trains so many steps; its files go to `out`."""
    python = str(python_of(framework, root))
    if framework.name == "megarl":
        return [python, "-m", "megarl", *megarl_arguments(framework.algorithm, task, steps, out)]
    if framework.name == "trl":
        return [python, str(HERE / f"trl_{framework.algorithm}.py"), str(task), str(steps), str(out)]
    return [python, "-m", "verl.trainer.main_ppo", *verl_arguments(framework.algorithm, task, steps)]


def environment(framework: Framework, outer: dict[str, str], out: Path, scratch: str) -> dict[str, str]:
    """The environment variables of its command. `scratch`: a folder for verl's Ray, whose sockets need a short path."""
    kept = {name: value for name, value in outer.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    common = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    if framework.name == "megarl":
        return {**kept, **common, "PYTHONPATH": str(REPOSITORY)}
    ray = {
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": scratch,
        "RAY_worker_niceness": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {
        **kept,
        **common,
        **(ray if framework.name == "verl" else {}),
        "OMP_NUM_THREADS": "2",
        "TENSORBOARD_DIR": str(out),
    }


def megarl_arguments(algorithm: str, task: Path, steps: int, out: Path) -> list[str]:
    return [
        "train",
        str(HERE / f"megarl_{algorithm}.yaml"),
        f"data.train_files={task / 'train.parquet'}",
        f"actor_rollout_ref.model.path={task / 'model'}",
        f"custom_reward_function.path={HERE / 'reward.py'}",
        f"trainer.default_local_dir={out}",
        f"trainer.total_training_steps={steps}",
    ]


def verl_arguments(algorithm: str, task: Path, steps: int) -> list[str]:
    """Hydra's overrides; everything in float32, no recomputation, no padding removal (which needs flash-attn)."""
    float32 = "mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    arguments = [
        f"algorithm.adv_estimator={'grpo' if algorithm == 'grpo' else 'gae'}",
        "trainer.device=cpu",
        f"data.train_files={task / 'train.parquet'}",
        f"data.val_files={task / 'train.parquet'}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.max_prompt_length=32",
        f"data.max_response_length={RESPONSE_TOKENS}",
        "data.dataloader_num_workers=0",
        f"{model}.path={task / 'model'}",
        f"{model}.enable_gradient_checkpointing=False",
        f"{model}.use_remove_padding=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr={LEARNING_RATE}",
        f"{actor}.ppo_mini_batch_size={NUM_PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu={BATCH}",
        f"{actor}.use_kl_loss=False",
        f"{actor}.use_torch_compile=False",
        f"+{actor}.fsdp_config.{float32}",
        f"{rollout}.name=hf",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.top_k=0",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={BATCH}",
        f"custom_reward_function.path={HERE / 'reward.py'}",
        "reward_model.strategy=fsdp2",
        "critic.strategy=fsdp2",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        "ray_init.num_cpus=8",
    ]
    if algorithm == "ppo":
        arguments += [
            f"critic.model.path={task / 'model'}",
            f"critic.model.tokenizer_path={task / 'model'}",
            "critic.model.enable_gradient_checkpointing=False",
            "critic.model.use_remove_padding=False",
            f"+critic.model.fsdp_config.{float32}",
            f"critic.optim.lr={LEARNING_RATE}",
            f"critic.ppo_mini_batch_size={NUM_PROMPTS}",
            f"critic.ppo_micro_batch_size_per_gpu={BATCH}",
            f"critic.forward_micro_batch_size_per_gpu={BATCH}",
        ]
    return arguments
