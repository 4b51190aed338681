"""Keys of every run: devices, checkpoints and resuming, health, traces, loggers, timeouts."""

from dataclasses import dataclass

from megarl.config.schema import option


@dataclass(frozen=True, kw_only=True)
class SavingConfig:
    """Checkpoints, from which a run goes on as if it had never ended: <run folder>/checkpoints/step-<n>."""

    save_freq: int = option(
        "A checkpoint every so many steps: models, optimizers, schedules, random numbers, data positions; -1: not by steps.",
        -1,
        ge=-1,
    )
    save_minutes: float | None = option(
        "A checkpoint after the first step that ends so many minutes after the last one; null: not by time.",
        None,
        gt=0,
    )
    max_run_minutes: float | None = option(
        "The run may take so long, from its start: it saves and ends, with exit code 75, while there still is time for it, "
        "going by the longest step and the longest save so far; null: no limit.",
        None,
        gt=0,
    )
    save_hf: bool = option(
        "Each checkpoint also has the policy (with LoRA merged, and its adapters in PEFT's format) as a Hugging Face model, in its "
        "folder hf.",
        False,
    )
    async_save: bool = option(
        "Files of a checkpoint are written while the next steps run; it takes a copy of the states in the host's memory.",
        False,
    )
    on_save_error: str = option(
        "What a checkpoint does to the run that cannot be written (a full disk): stop it, or let it go on with a warning. Older "
        "ones stay as they were.",
        "stop",
        choices=("stop", "continue"),
    )
    max_ckpt_to_keep: int | None = option("The newest so many checkpoints are kept; null: all.", None, ge=1)
    keep_every: int | None = option(
        "Of steps that this number divides checkpoints are kept besides; null: none.", None, ge=1
    )
    best_metric: str | None = option(
        "A metric of validations (val/...): the checkpoint of the best value so far is saved when it is reached, and kept; null: "
        "none.",
        None,
    )
    best_mode: str = option(
        "Whether the best value of best_metric is the greatest or the least.", "max", choices=("max", "min")
    )
    checkpoint_url: str | None = option(
        "A folder that fsspec can open (s3://bucket/run): checkpoints are copied there while the run goes on, and taken from there "
        "where the run folder has none as new; null: none.",
        None,
    )
    resume_mode: str = option(
        "auto: go on from the newest good checkpoint of the run folder, if there is one; disable: begin anew; path: go on from "
        "resume_from_path. A run that begins anew moves the files of an earlier run in its folder to earlier_runs/<n>; one that goes on "
        "from an earlier step moves the checkpoints of later ones to checkpoints-<n>. Nothing is overwritten.",
        "auto",
        choices=("auto", "disable", "path"),
        refused={"resume_path": "write path"},
    )
    resume_from_path: str | None = option(
        "The checkpoint (a folder step-<n>) that resume_mode=path goes on from.", None, is_path=True
    )
    max_restarts: int = option(
        "A run that loses a process (it died, or hangs) is started again by itself, so often, from its newest checkpoint.",
        0,
        ge=0,
    )


FINDINGS = (
    "ppo_kl_high",
    "ppo_kl_low",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "duplicate_responses",
    "ngram_repetition",
    "equal_rewards",
    "long_responses",
    "mismatch",
    "stagnation",
)


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Bounds of a healthy run's metrics; a metric beyond its bound is reported with advice. null: not checked."""

    enable: bool = option(
        "Look at each step's metrics and trajectories: findings are printed, and written to <run folder>/health.jsonl.",
        True,
    )
    every: int = option("Steps for which a kind of finding is not reported again.", 10, ge=1)
    patience: int = option(
        "Steps in a row in which it must be so; on average over them, it must be beyond its threshold by two standard errors.",
        5,
        ge=1,
    )
    ppo_kl_high: float | None = option(
        "ppo_kl_high: KL from the policy before the step, nats a token, over this (healthy: 0.01 to 0.03).",
        0.05,
        gt=0,
    )
    ppo_kl_low: float | None = option(
        "ppo_kl_low: the KL from the policy before the step, by the estimator k3, under this, with a KL to the reference, "
        "several updates a step and at least half of optim.lr, while the scores of the last 10 steps are not over those of the first 10; not between players of a game.",
        1e-5,
        ge=0,
    )
    grad_norm: float | None = option(
        "grad_norm: the actor's gradient, before clipping, over this (healthy: under 10).", 100.0, gt=0
    )
    entropy_ratio: float | None = option("entropy: under this share of the first step's.", 0.1, ge=0, le=1)
    entropy_min: float | None = option("entropy: under this, nats a token.", 0.01, ge=0)
    clip_fraction: float | None = option(
        "clip_fraction: share of tokens whose ratio is clipped, over this.", 0.4, gt=0, le=1
    )
    duplicate_responses: float | None = option(
        "duplicate_responses: share of the responses to a prompt that repeat another one, over this.",
        0.9,
        gt=0,
        le=1,
    )
    ngram_repetition: float | None = option(
        "ngram_repetition: share of a response's runs of 4 tokens that occurred in it before, over this.",
        0.5,
        gt=0,
        le=1,
    )
    equal_rewards: bool = option(
        "equal_rewards: all trajectories of the step have the same score, and these are 30 in a row or more.",
        True,
    )
    long_responses: float | None = option(
        "long_responses: share of responses that were cut at their longest length, over this.",
        0.5,
        gt=0,
        le=1,
    )
    mismatch: float | None = option(
        "mismatch: mean difference of engine's and trainer's log-probs, nats, over this.", 0.1, gt=0
    )
    stagnation: int | None = option(
        "stagnation: validations in a row in which val/score/mean did not rise above its best, and which do not rise by their trend.",
        5,
        ge=1,
    )
    early_stop: tuple[str, ...] = option(
        "Findings that end the run, after its step; the model is exported.", (), choices=FINDINGS
    )
    auto_action: bool = option(
        "At ppo_kl_high, duplicate_responses and ngram_repetition: raise the KL coefficients in use, lower the clip ratios.",
        False,
    )
    kl_coef_factor: float = option(
        "auto_action: what the KL coefficients (algorithm.kl_ctrl, actor.kl_loss_coef) are multiplied with.",
        2.0,
        gt=1,
    )
    kl_coef_max: float = option("auto_action: no coefficient is raised over this.", 1.0, gt=0)
    clip_ratio: float = option("auto_action: what clip ratios over it are lowered to.", 0.1, gt=0)


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Records of the work of each process over time."""

    timeline_mb: int = option(
        "MB that <run folder>/timeline.json may take: what every process did and when, as ui.perfetto.dev shows it. Of a longer "
        "run it has the newest, in two files (timeline.earlier.json). 0: none.",
        64,
        ge=0,
    )
    profile_steps: tuple[int, ...] = option(
        "Steps in which ranks with a Megatron model write traces of torch.profiler: <run folder>/profiles/step-<n>/"
        "<role>-rank<r>.json, for ui.perfetto.dev. These steps are slower.",
        (),
        ge=1,
    )
    profile_ranks: tuple[int, ...] = option(
        "Which ranks of each role profile_steps is of; a role with fewer ranks leaves the others out.",
        (0,),
        ge=0,
    )


# Loggers that are packages: name and command that installs it.
TRACKERS = {
    "wandb": "pip install wandb",
    "mlflow": "pip install mlflow",
    "swanlab": "pip install 'swanlab>=0.10'",
    "trackio": "pip install 'trackio>=0.43'",
}
LOGGERS = ("console", "tensorboard", "file", *TRACKERS)
DEFAULT_LOGGERS = ("console", "tensorboard")
LOGGER_HELP = (
    "Where metrics go. console: a line a step. tensorboard: <run folder>/tensorboard. file: metrics.jsonl in the run "
    "folder, which is written in any case. wandb, mlflow, swanlab, trackio: to these, where they are installed, under "
    "project_name and experiment_name."
)


@dataclass(frozen=True, kw_only=True)
class RunConfig(SavingConfig, TracingConfig):
    """Which run it is, how long it is and on how many devices."""

    project_name: str = option("First folder of the default run folder.", "megarl")
    experiment_name: str = option("Second folder of the default run folder.", "ppo")
    default_local_dir: str | None = option(
        "The run folder; null: outputs/<project_name>/<experiment_name>.", None, is_path=True
    )
    total_epochs: int = option("Passes over the training prompts.", 1, ge=1)
    total_training_steps: int | None = option("Steps; null: from total_epochs.", None, ge=1)
    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices a node: GPUs, or processes where there are none.", 1, ge=1)
    metrics_port: int | None = option(
        "Port at which the controller serves the newest metrics to Prometheus, on all interfaces and without a password; null: none.",
        None,
        ge=1,
        le=65535,
    )
    test_freq: int = option("Validate every so many steps, and after the last; -1: never.", -1, ge=-1)


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """How long processes wait for each other, and how the controller reaches many of them. A section has these keys last, so its class
    inherits from this one first."""

    collective_timeout: float = option("Seconds that ranks wait for each other.", 600.0, gt=0)
    phase_timeout: float | None = option(
        "Seconds that any one call of ranks or engines may take, such as all updates of a step; null: no limit.",
        7200.0,
        gt=0,
    )
    idle_timeout: float | None = option(
        "Seconds after which a call counts as hung if none of the processes that are waited for uses a processor or a disk; "
        "null: never. With rollout.multi_turn at least twice its step_timeout.",
        60.0,
        gt=0,
    )
    relays_from: int | None = option(
        "Ranks of a model from which calls go through relays, one process for each 32 ranks, which spare the "
        "controller most of its calls; null: never.",
        64,
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """A set of devices. A device is a GPU, or on a machine without any a place for one process."""

    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices on each node.", ge=1)

    @property
    def num_devices(self) -> int:
        """Devices on all nodes."""
        return self.nnodes * self.n_gpus_per_node
