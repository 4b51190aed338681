"""Sections of the configuration that more than one command reads."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass

from megarl.config.options import option, section

DTYPES = ("float32", "bfloat16")
LR_DECAY_STYLES = ("constant", "linear", "cosine")
LOGGERS = ("console", "tensorboard")
ROLLOUT_ENGINES = ("sglang",)
TRUNCATIONS = ("error", "left", "right", "middle")


@dataclass(frozen=True, kw_only=True)
class ModelPathConfig:
    """A Hugging Face model."""

    path: str = option("Folder with config.json, weights (safetensors) and tokenizer.", is_path=True)
    tokenizer_path: str | None = option(
        "Folder of the tokenizer; null: that of the model.", None, is_path=True
    )
    trust_remote_code: bool = option("Run Python code that comes with the tokenizer.", False)


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


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Layout and execution of one Megatron model. Data parallel is what remains of the pool's devices."""

    tensor_model_parallel_size: int = option("Devices that share each layer (tp).", 1, ge=1)
    pipeline_model_parallel_size: int = option("Stages that share the layers (pp).", 1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = option(
        "Model chunks a stage, for the interleaved schedule (vpp); null: one.", None, ge=2
    )
    context_parallel_size: int = option("Devices that share each sequence (cp).", 1, ge=1)
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
    log_prob_chunk_tokens: int = option("Tokens whose logits exist at one time on a rank.", 1024, ge=1)
    seed: int = option("Of newly made weights and of Megatron's random state.", 1, ge=0)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How validation and evaluation sample."""

    temperature: float = option("0: greedy.", 0.0, ge=0)
    top_p: float = option("Probability mass that is sampled from; 1: all.", 1.0, gt=0, le=1)
    top_k: int = option("Most probable tokens that are sampled from; -1: all.", -1, ge=-1)
    n: int = option("Responses a prompt.", 1, ge=1)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engines that generate responses."""

    name: str = option("The engine.", "sglang", choices=ROLLOUT_ENGINES)
    tensor_model_parallel_size: int = option("Devices that share one engine's model.", 1, ge=1)
    num_engines: int | None = option("Engines; null: as many as the pool's devices hold.", None, ge=1)
    n: int = option("Responses a prompt.", 1, ge=1)
    temperature: float = option("Of training rollouts.", 1.0, gt=0)
    top_p: float = option("Of training rollouts: 1 (all) only.", 1.0)
    top_k: int = option("Of training rollouts: -1 (all) only.", -1)
    dtype: str | None = option(
        "Of the weights; null: bfloat16 on GPUs, float32 on CPUs.", None, choices=DTYPES
    )
    gpu_memory_utilization: float = option(
        "Part of a GPU's memory for weights and KV cache.", 0.5, gt=0, le=1
    )
    max_num_seqs: int = option("Requests that an engine runs at a time; the others wait.", 256, ge=1)
    max_total_tokens: int | None = option(
        "Tokens in an engine's KV cache; null: from the memory.", None, ge=1
    )
    seed: int = option("Of the sampling.", 1, ge=0)
    start_timeout: float = option("Seconds that the start of an engine may take.", 300.0, gt=0)
    request_timeout: float = option("Seconds that one call of an engine may take.", 600.0, gt=0)
    val_kwargs: SamplingConfig = section("How validation samples.", SamplingConfig)
    sync_bucket_mb: int = option("MiB of one bucket of a weight sync.", 256, ge=1)
    resource_pool: str | None = option("Where the engines live; null: with the actor.", None)


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig:
    """A reward function of the user's."""

    path: str | None = option(
        "A .py file; null: the rule that belongs to each row's data_source.", None, is_path=True
    )
    name: str = option("The function in it.", "compute_score")


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """A set of devices. A device is a GPU, or on a machine without any a place for one process."""

    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices on each node.", ge=1)
