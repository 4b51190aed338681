"""Models that are trained: where they are, their low-rank adapters, optimizer and parallel layout."""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.schema import option, section

ALL_LINEAR = "all-linear"
FLOAT8_BLOCK, FLOAT8_TOKENS = 128, 16  # of training in float8: values that share a scale; rows of a product
# Values of other trainers, and what to do instead.
_FSDP = (
    "megarl trains with Megatron-core: leave the key out; what FSDP shares out Megatron-FSDP does with fsdp=optim_grads_params in "
    "the section megatron beside it, also next to tensor_model_parallel_size and context_parallel_size"
)
NO_OTHER_STRATEGY = {"fsdp": _FSDP, "fsdp2": _FSDP} | dict.fromkeys(
    ("ddp", "deepspeed", "veomni", "torchtitan", "mindspeed"),
    "megarl trains with Megatron-core: leave the key out; the section megatron beside it says how devices share the model "
    "(tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, ...)",
)
NO_PADDING = (
    "megarl packs sequences and pads nothing anywhere, so there is nothing to switch off; leave it out"
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685), trained in place of the model's weights, which stay as they are."""

    rank: int = option("Rank of the adapters; 0: none, all weights are trained.", 0, ge=0)
    alpha: float | None = option(
        "Their outputs are multiplied with alpha / rank; null: alpha is the rank.",
        None,
        gt=0,
        formula="y = W x + alpha / rank B A dropout(x)",
    )
    dropout: float = option("Share of their inputs that is dropped in training.", 0.0, ge=0, lt=1)
    target_modules: str | tuple[str, ...] = option(
        "Which linear layers have one, by Hugging Face's names: all-linear (all but the head and routers), a last part "
        "(q_proj), or a pattern of the whole name (model.layers.1?.mlp.*); one of these, or a list. Routers are chosen by "
        "gate, or a pattern that ends in .gate, alone: [all-linear, gate] is what all-linear is to PEFT.",
        (ALL_LINEAR,),
    )
    exclude_modules: str | tuple[str, ...] = option("Which of these have none, likewise.", ())
    use_rslora: bool = option(
        "Outputs are multiplied with alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732).", False
    )
    use_dora: bool = option(
        "Directions are adapted, and a magnitude for each output is trained (DoRA, arXiv:2402.09353).",
        False,
        formula="y = m / |W + alpha / rank B A| (W + alpha / rank B A) x",
    )
    shared_a: bool = option(
        "Projections that Megatron computes as one (q, k and v; gate and up) share A, as one adapter of the fused layer; "
        "false: each has its own, as in PEFT.",
        False,
    )
    expert_groups: int | None = option(
        "So many groups of neighbouring experts share an adapter; null: each expert has its own.", None, ge=1
    )
    base_dtype: str | None = option(
        "How the frozen weights of linear layers are held: null, as the model's type has them; float8, e4m3 in blocks that "
        "share a scale, as in DeepSeek-V3's checkpoints (whose blocks are taken as they are). A layer's weight is made from "
        "it when the layer computes, forward and backward.",
        None,
        choices=("float8",),
    )
    base_block: int = option(
        "Rows and columns of such a block; shards must not cut one. Smaller ones fit more layouts, and hold more precisely.",
        128,
        ge=1,
    )
    adapter_path: str | None = option(
        "Folder of an adapter in PEFT's format to begin with; null: new ones, whose outputs are 0. A reference policy is the "
        "model without it.",
        None,
        is_path=True,
    )

    def __post_init__(self) -> None:
        """A single text becomes a list of one, also for comparisons of configurations."""
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))

    @property
    def blocks(self) -> int | None:
        """Rows and columns of a block of the frozen weights; None: they are not in float8."""
        return self.base_block if self.rank and self.base_dtype is not None else None


DTYPES = ("float32", "bfloat16", "float16")
LR_DECAY_STYLES = ("constant", "linear", "cosine")
MTP_CHOICES = ("drop", "keep", "train")
INDEXER_CHOICES = ("freeze", "train")


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
        "Its multi-token prediction layers: drop, left out of the exported model; keep, kept there as they are; train, trained with the "
        "model, and exported.",
        "drop",
        choices=MTP_CHOICES,
    )
    mtp_loss_coef: float = option(
        "Of mtp=train: weight of these layers' loss, a mean over the layers and the tokens that the update learns from.",
        0.1,
        gt=0,
        formula="mtp_loss_coef / (depth tokens) sum of -log p(token k + 1 places later) (arXiv:2412.19437, equations 24 and 25)",
    )
    mtp_detached: bool = option(
        "Of mtp=train: that loss trains these layers alone, and the gradients of all other weights are the same bits as without it; false: "
        "it trains the whole model, as in pretraining.",
        True,
    )
    indexer: str = option(
        "The indexers of its sparse attention (DeepSeek-V3.2, GLM-5): freeze, they stay as they are; train, each learns, from a loss of its own alone, to "
        "score the keys that it has chosen as its layer's attention weighs them.",
        "freeze",
        choices=INDEXER_CHOICES,
    )
    indexer_loss_coef: float = option(
        "Of indexer=train: weight of that loss, in each layer a mean over the tokens that the update learns from. Gradients of indexers are clipped by "
        "a norm of their own.",
        1.0,
        gt=0,
        formula="indexer_loss_coef / tokens sum of KL(p || softmax(I)) over the keys S_t chosen for a token, p the probabilities of attention summed "
        "over its heads, I the indexer's scores (arXiv:2512.02556, section 2.1)",
    )
    lora: LoraConfig = section("Low-rank adapters: what is trained instead of the weights.", LoraConfig)


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon (K. Jordan et al. 2024): the momentum of a matrix is made orthogonal, near enough, before it is a step."""

    momentum: float = option("Decay of the gradient's mean.", 0.95, ge=0, lt=1)
    nesterov: bool = option("The step is made of the gradient and this mean, as momentum weighs them.", True)
    num_ns_steps: int = option("Steps of the Newton-Schulz iteration, which makes it orthogonal.", 5, ge=1)
    coefficients: str = option(
        "The iteration's: simple (the same in each step, as in the original and in torch.optim.Muon), quintic (five of their own), "
        "polar_express (arXiv:2505.16932).",
        "quintic",
        choices=("simple", "quintic", "polar_express"),
        formula="X <- a X + (b A + c A^2) X, A = X X^T",
    )
    ns_dtype: str = option("What it computes in.", "bfloat16", choices=("bfloat16", "float32"))
    scale_mode: str = option(
        "How large a step of an m x n matrix is: spectral, sqrt(max(m, n)); shape_scaling, sqrt(max(1, m / n)); unit_rms_norm, sqrt(m / n).",
        "spectral",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
    )
    scale: float = option(
        "Times this. 0.2 with spectral gives steps of the size of AdamW's, at the same lr (arXiv:2502.16982, equation 4).",
        0.2,
        gt=0,
    )
    tp_mode: str = option(
        "A matrix that tensor parallel ranks share: duplicated, gathered and computed on each of them; distributed, computed together, "
        "with a sum over ranks in each step; blockwise, each rank's part by itself, which is another step with each "
        "tensor_model_parallel_size.",
        "duplicated",
        choices=("duplicated", "distributed", "blockwise"),
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, with decoupled weight decay, and its learning rate schedule."""

    optimizer: str = option(
        "adam: AdamW. muon: Muon for the matrices of layers, AdamW for embeddings, the head and all that is no matrix.",
        "adam",
        choices=("adam", "muon"),
        refused={
            "adamw": "adam is AdamW",
            "dist_muon": "muon is shared out over data parallel ranks where megatron.use_distributed_optimizer is true",
        },
    )
    muon: MuonConfig = section("Of optimizer=muon.", MuonConfig)
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


_ONE_SCALE = "has one scale for a tensor, which {}: the log-probs of a text would depend on its neighbours in a batch; blockwise has not"
_OTHER_RECIPES = {
    "delayed": _ONE_SCALE.format("follows from earlier batches"),
    "tensorwise": _ONE_SCALE.format("follows from all texts of a micro-batch"),
    "mxfp8": "it is of Blackwell GPUs alone and has not been executed, not even as a shadow; blockwise runs there too",
    "custom": "a function of one's own would make scales that plans and checks do not know; use blockwise",
}

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts")


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
    pipeline_model_parallel_layout: str | None = option(
        "Which layers each stage has, in Megatron's notation: E the embedding, t a layer, L the head, | between stages, *n repeats "
        "(Ettt|(tt|)*6tL: 8 stages); with virtual stages the first chunks of all stages, then the second ones. null: equal shares, but for the "
        "two keys above.",
        None,
    )
    sequence_parallel: bool | None = option(
        "Split activations between tensor parallel parts along the sequence; null: where tp > 1.", None
    )
    use_distributed_optimizer: bool = option("Shard optimizer state over data parallel ranks.", True)
    fsdp: str | None = option(
        "Megatron-FSDP: what data (and context) parallel ranks share: optim_grads, gradients and optimizer states; "
        "optim_grads_params, weights too, which each layer gathers for its passes. null: without it, and "
        "use_distributed_optimizer shares optimizer states. A model that is not trained has weights alone to share.",
        None,
        choices=("optim_grads", "optim_grads_params"),
        refused={
            "optim": "that is use_distributed_optimizer=true without it; leave it out",
            "no_shard": "leave it out",
        },
    )
    overlap_grad_reduce: bool | None = option(
        "Reduce gradients while the backward pass runs; null: on GPUs with data parallelism and the distributed optimizer, where it hides the "
        "reduction behind the pass; on CPUs, which have no second stream, not.",
        None,
    )
    overlap_param_gather: bool | None = option(
        "Gather the updated weights of a distributed optimizer while the next forward pass begins, in place of before it; null: as "
        "overlap_grad_reduce. It needs that.",
        None,
    )
    recompute_granularity: str | None = option(
        "What the backward pass computes again instead of storing it: full: each layer; selective: recompute_modules; null: nothing.",
        None,
        choices=("full", "selective"),
    )
    recompute_modules: tuple[str, ...] | None = option(
        "Of selective: parts of a layer that are computed again. core_attn: attention (of no use with flash kernels, which store no scores); "
        "layernorm: norms; mla_up_proj: keys and values of latent attention from their latent ones; moe_act, mlp, moe, shared_experts: gated "
        "units of experts, dense MLPs, all of an MoE layer, shared experts. layernorm, mla_up_proj and moe_act need Transformer Engine. "
        "null: core_attn.",
        None,
        choices=RECOMPUTE_MODULES,
    )
    dtype: str | None = option(
        "Of the weights; null: bfloat16 on GPUs, float32 on CPUs.", None, choices=DTYPES
    )
    fp8: str | None = option(
        "Linear layers and experts compute in float8, forward and backward, with Transformer Engine on GPUs alone; weights, gradients and "
        "optimizer states stay as they are, and so do embeddings, norms, attention, routers and heads. e4m3: all of it in e4m3; hybrid: gradients "
        "of outputs in e5m2. null: in dtype. What no longer holds with it: docs/reproducibility.md.",
        None,
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = option(
        "Of fp8: which values share a scale. blockwise: 128 neighbours of a row, and 128 x 128 of a weight.",
        "blockwise",
        choices=("blockwise",),
        refused=_OTHER_RECIPES,
    )
    num_layers_at_start_in_bf16: int = option(
        "Of fp8: so many of the model's first layers stay in dtype.", 0, ge=0
    )
    num_layers_at_end_in_bf16: int = option("Of fp8: so many of its last layers likewise.", 0, ge=0)
    param_offload: bool | None = option(
        "Weights leave the devices while they are not used; null: where rollout engines share GPUs with them.",
        None,
    )
    grad_offload: bool | None = option("Gradient buffers likewise.", None)
    optimizer_offload: bool | None = option("Optimizer states likewise.", None)
    log_prob_chunk_tokens: int | None = option(
        "Tokens whose logits exist at one time on a rank; null: on GPUs as many as have 1 GiB of logits, on CPUs 1024.",
        None,
        ge=1,
    )
    seed: int = option("Of newly made weights and of Megatron's random state.", 1, ge=0)
    override_transformer_config: dict[str, Any] | None = option(
        "Further fields of Megatron-core's TransformerConfig, by its own names; which may be set, and which are refused and why, is listed at "
        "the end of this page. Names and types are checked against the Megatron-core that is installed.",
        None,
    )
    override_ddp_config: dict[str, Any] | None = option(
        "Likewise of its DistributedDataParallelConfig.", None
    )

    @property
    def token_multiple(self) -> int:
        """The number that divides the tokens of every rank's part of a micro-batch: 1 without float8.

        cuBLAS's float8 products sum over tokens in steps of 16 (`get_fp8_align_size` of megatron-core 0.19.2). Tensor parallel ranks whose
        parts are multiples of 128 gather their inputs in float8; others gather them in dtype and quantise a second time
        (`Float8BlockQuantizer.is_quantizable` of Transformer Engine 2.18).
        """
        if self.fp8 is None:
            return 1
        gathers = self.tensor_model_parallel_size > 1 and self.sequence_parallel is not False
        return FLOAT8_BLOCK if gathers else FLOAT8_TOKENS
