"""Low-rank adapters: section `lora` of a model that is trained."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.

from dataclasses import dataclass

from megarl.config.schema.options import option

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685): what is trained instead of the model's weights, which stay as they are."""

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
        """One text is a list of one, also where configurations are compared."""
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))

    @property
    def blocks(self) -> int | None:
        """Rows and columns of a block of the frozen weights; None: they are not in float8."""
        return self.base_block if self.rank and self.base_dtype is not None else None
