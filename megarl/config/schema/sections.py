"""Sections of the configuration that more than one command reads."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass

from megarl.config.aliases import NO_OTHER_ENGINE, NO_PADDING
from megarl.config.schema.lora import LoraConfig
from megarl.config.schema.multi_turn import MultiTurnConfig
from megarl.config.schema.options import option, section

DTYPES = ("float32", "bfloat16", "float16")
LR_DECAY_STYLES = ("constant", "linear", "cosine")
# Beside the console and the run folder: packages that must be installed, each with how it is.
TRACKERS = {
    "wandb": "pip install wandb",
    "mlflow": "pip install mlflow",
    "swanlab": "pip install 'swanlab>=0.10'",
}
LOGGERS = ("console", "tensorboard", "file", *TRACKERS)
DEFAULT_LOGGERS = ("console", "tensorboard")
LOGGER_HELP = (
    "Where metrics go. console: a line a step. tensorboard: <run folder>/tensorboard. file: metrics.jsonl in the run "
    "folder, which is written in any case. wandb, mlflow, swanlab: to these, where they are installed, under "
    "project_name and experiment_name."
)
PHASE_TIMEOUT_HELP = (
    "Seconds that any one call of ranks or engines may take, such as all updates of a step; null: no limit."
)
IDLE_TIMEOUT_HELP = (
    "Seconds after which a call counts as hung if none of the processes that are waited for uses a processor or a disk; "
    "null: never. With rollout.multi_turn at least twice its step_timeout."
)
RELAYS_FROM_HELP = (
    "Ranks of a model from which calls go through relays, one process for each 16 ranks of a machine, which spare the "
    "controller most of its calls; null: never."
)
ROLLOUT_ENGINES = ("sglang",)
MTP_CHOICES = ("drop", "keep")
SYNC_TRANSPORTS = ("auto", "shared_memory", "p2p")
LORA_SYNCS = ("adapters", "merged")


@dataclass(frozen=True, kw_only=True)
class ModelPathConfig:
    """A Hugging Face model."""

    path: str = option(
        "Folder with config.json, weights (safetensors) and tokenizer; or the model's id on the Hugging Face Hub.",
        is_path=True,
    )
    tokenizer_path: str | None = option(
        "Folder of the tokenizer, or an id on the Hub; null: that of the model.", None, is_path=True
    )
    trust_remote_code: bool = option("Run Python code that comes with the tokenizer.", False)


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig(ModelPathConfig):
    """A Hugging Face model that is trained."""

    use_remove_padding: bool = option("Sequences are packed.", True, refused={False: NO_PADDING})
    enable_gradient_checkpointing: bool | None = option(
        "true: megatron.recompute_granularity=full, false: null; null: as that says.", None
    )
    mtp: str = option(
        "Its multi-token prediction layers, which are not trained: left out of the exported model, or kept as they are.",
        "drop",
        choices=MTP_CHOICES,
    )
    lora: LoraConfig = section("Low-rank adapters: what is trained instead of the weights.", LoraConfig)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with decoupled weight decay, and its learning rate schedule."""

    lr: float = option("Learning rate after the warm-up.", ge=0)
    min_lr: float = option("Learning rate at the end of the decay.", 0.0, ge=0)
    lr_warmup_steps: int = option(
        "Optimizer steps over which the learning rate rises linearly to lr.", 0, ge=0
    )
    lr_decay_style: str = option("How it falls after the warm-up.", "constant", choices=LR_DECAY_STYLES)
    lr_decay_steps: int | None = option(
        "Optimizer steps, warm-up included, at which min_lr is reached; null: those of the whole run.",
        None,
        ge=1,
    )
    weight_decay: float = option("Decay of matrices; norms and biases have none.", 0.01, ge=0)
    betas: tuple[float, float] = option(
        "Decay of the gradient's first and second moment.", (0.9, 0.95), ge=0, lt=1
    )
    eps: float = option("Added to the root of the second moment.", 1e-8, gt=0)
    clip_grad: float = option("Largest norm of the whole gradient; 0: not clipped.", 1.0, ge=0)
    optimizer_cpu_offload: bool = option(
        "Adam's states and the float32 copies of the weights stay on the host, and pass through the device in buckets while it "
        "updates.",
        False,
    )
    initial_loss_scale: float = option(
        "float16: what the loss is multiplied with at first, so that small gradients do not vanish.",
        65536.0,
        gt=0,
    )
    min_loss_scale: float = option("float16: the least it may fall to.", 1.0, gt=0)
    loss_scale_window: int = option(
        "float16: updates without an overflow after which it doubles.", 1000, ge=1
    )
    hysteresis: int = option(
        "float16: overflows after which it is halved; each one skips its update.", 2, ge=1
    )


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Layout and execution of one Megatron model. Data parallel is what remains of the pool's devices."""

    tensor_model_parallel_size: int = option("Devices that share each layer (tp).", 1, ge=1)
    pipeline_model_parallel_size: int = option("Stages that share the layers (pp).", 1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = option(
        "Model chunks a stage, for the interleaved schedule (vpp); null: one.", None, ge=2
    )
    context_parallel_size: int = option("Devices that share each sequence (cp).", 1, ge=1)
    expert_model_parallel_size: int = option("Devices that share the experts of a layer (ep).", 1, ge=1)
    expert_tensor_parallel_size: int = option("Devices that share each expert (etp).", 1, ge=1)
    num_layers_in_first_pipeline_stage: int | None = option(
        "Layers of the first stage; null: as many as other stages have.", None, ge=1
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        "Layers of the last stage; null: as many as other stages have.", None, ge=1
    )
    sequence_parallel: bool | None = option(
        "Split activations between tensor parallel parts along the sequence; null: where tp > 1.", None
    )
    use_distributed_optimizer: bool = option("Shard optimizer state over data parallel ranks.", True)
    overlap_grad_reduce: bool = option("Reduce gradients while the backward pass runs.", False)
    recompute_granularity: str | None = option(
        "What the backward pass computes again instead of storing it; null: nothing.",
        None,
        choices=("full", "selective"),
    )
    dtype: str | None = option(
        "Of the weights; null: bfloat16 on GPUs, float32 on CPUs.", None, choices=DTYPES
    )
    param_offload: bool | None = option(
        "Weights leave the devices while they are not used; null: where rollout engines share GPUs with them.",
        None,
    )
    grad_offload: bool | None = option("Gradient buffers likewise.", None)
    optimizer_offload: bool | None = option("Optimizer states likewise.", None)
    log_prob_chunk_tokens: int = option("Tokens whose logits exist at one time on a rank.", 1024, ge=1)
    seed: int = option("Of newly made weights and of Megatron's random state.", 1, ge=0)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How validation and evaluation sample."""

    temperature: float = option("0: greedy.", 0.0, ge=0)
    top_p: float = option("Probability mass that is sampled from; 1: all.", 1.0, gt=0, le=1)
    top_k: int = option("Most probable tokens that are sampled from; -1: all.", -1, ge=-1)
    min_p: float = option(
        "Tokens of less than this part of the most probable one's probability are left out; 0: none.",
        0.0,
        ge=0,
        le=1,
    )
    repetition_penalty: float = option(
        "The logits of tokens that occurred in the response are divided by it (negative ones multiplied); 1: not.",
        1.0,
        gt=0,
        le=2,
    )
    frequency_penalty: float = option(
        "Taken from a token's logit for each time that it occurred in the response.", 0.0, ge=-2, le=2
    )
    presence_penalty: float = option(
        "Taken from a token's logit if it occurred in the response.", 0.0, ge=-2, le=2
    )
    n: int = option(
        "Responses a prompt; over 1: the scores are also given as mean@n, best@n, pass@k and maj@n.", 1, ge=1
    )
    pass_threshold: float = option("Score from which on an answer passes (pass@k).", 1.0)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engines that generate responses."""

    name: str = option("The engine.", "sglang", choices=ROLLOUT_ENGINES, refused=NO_OTHER_ENGINE)
    tensor_model_parallel_size: int = option("Devices that share one engine's model.", 1, ge=1)
    expert_parallel_size: int = option(
        "Groups of an engine's devices that share the experts (SGLang's ep_size).", 1, ge=1
    )
    nodes_per_engine: int | None = option(
        "Nodes that share an engine's devices evenly, each with a process of its own; null: as few as its devices need.",
        None,
        ge=1,
    )
    num_engines: int | None = option("Engines; null: as many as the pool's devices hold.", None, ge=1)
    allow_unknown_version: bool = option(
        "Start an engine of a version that megarl was not tried with.", False
    )
    n: int = option("Responses a prompt.", 1, ge=1)
    temperature: float = option("Of training rollouts.", 1.0, gt=0)
    top_p: float = option("Of training rollouts: 1 (all) only.", 1.0)
    top_k: int = option("Of training rollouts: -1 (all) only.", -1)
    min_p: float = option("Of training rollouts: 0 (all) only.", 0.0)
    repetition_penalty: float = option("Of training rollouts: 1 (none) only.", 1.0)
    frequency_penalty: float = option("Of training rollouts: 0 (none) only.", 0.0)
    presence_penalty: float = option("Of training rollouts: 0 (none) only.", 0.0)
    stop_token_ids: tuple[int, ...] = option(
        "Tokens that end a response, and are part of it, besides the model's end tokens.", ()
    )
    dtype: str | None = option(
        "Of the weights; null: bfloat16 on GPUs, float32 on CPUs.", None, choices=DTYPES
    )
    gpu_memory_utilization: float = option(
        "Part of a GPU's memory for weights and KV cache.", 0.5, gt=0, le=1
    )
    free_cache_engine: bool | None = option(
        "Weights and KV cache of the engines leave the devices while models are trained; null: where these share GPUs.",
        None,
    )
    max_num_seqs: int = option("Requests that an engine runs at a time; the others wait.", 256, ge=1)
    max_total_tokens: int | None = option(
        "Tokens in an engine's KV cache; null: from the memory.", None, ge=1
    )
    seed: int = option("Of the sampling.", 1, ge=0)
    deterministic: bool | None = option(
        "A response depends on weights, prompt and seed only, bit by bit, not on what else the engine does at the time "
        "(docs/reproducibility.md); on GPUs SGLang's enable_deterministic_inference. null: on CPUs in float32 that can.",
        None,
    )
    start_timeout: float | None = option(
        "Seconds that the start of an engine may take. null: 300 on CPUs; 1800 on GPUs, where the first start compiles kernels.",
        None,
        gt=0,
    )
    request_timeout: float = option(
        "Seconds within which an engine that has requests must compute the next tokens of any, and answer any other call. Long "
        "responses may take longer.",
        600.0,
        gt=0,
    )
    max_restarts: int = option(
        "How many engines that died or hang are started anew in a run; they get the current weights, and their "
        "unfinished trajectories are asked for again. 0: the run ends with the first.",
        3,
        ge=0,
    )
    val_kwargs: SamplingConfig = section("How validation samples.", SamplingConfig)
    multi_turn: MultiTurnConfig = section(
        "Trajectories of several turns, with an environment that answers the policy.", MultiTurnConfig
    )
    quantization: str | None = option(
        "fp8: the engines hold linear layers and experts in float8, quantised before they are sent; null: in dtype.",
        None,
        choices=("fp8",),
    )
    quantization_block_size: tuple[int, int] = option(
        "fp8: rows and columns of a block of weights that share a scale.", (128, 128), ge=1
    )
    sync_bucket_mb: int = option("MiB that a rank sends or receives of a weight sync at a time.", 256, ge=1)
    sync_transport: str = option(
        "How weights travel; auto: in shared memory within a machine (on GPUs: within a GPU), else point to point.",
        "auto",
        choices=SYNC_TRANSPORTS,
    )
    sync_skip_unchanged: bool = option("Send no weights that the engine holds already.", False)
    lora_sync: str | None = option(
        "Of a policy with adapters: adapters: the engines serve them beside the weights, which are sent once; merged: weights "
        "are sent with adapters in them; null: adapters where SGLang has them for the model, the weights stay in the engines, "
        "and none of the keys above need merged weights.",
        None,
        choices=LORA_SYNCS,
    )
    resource_pool: str | None = option("Where the engines live; null: with the actor.", None)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """A set of devices. A device is a GPU, or on a machine without any a place for one process."""

    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices on each node.", ge=1)
