"""Megatron's Adam (distributed or not), its learning rate schedule, and one guarded step.

Guarantee: a step whose gradients are not finite changes nothing and is reported.
"""

import math

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from megarl.config.schema import OptimConfig
from megarl.megatron import adam


def build_optimizer(
    chunks: list[DistributedDataParallel], optim: OptimConfig, *, num_steps: int | None = None
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW with decoupled weight decay, none on 1-D weights (norms, biases), and its schedule.

    Whether it is distributed over data parallel ranks is what `wrap_for_training` was told. With bfloat16
    parameters it keeps float32 copies, taken here: load weights before, or call
    `optimizer.reload_model_params()` after.

    Args:
        num_steps: optimizer steps of the whole run, where `optim.lr_decay_steps` is null.

    Raises:
        ValueError: a learning rate schedule that cannot be; names the keys.
    """
    adam.install()
    transformer_config = chunks[0].config
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=transformer_config.bf16,
        params_dtype=transformer_config.params_dtype,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
    )
    schedule = _schedule_arguments(optim, num_steps)
    optimizer = get_megatron_optimizer(config, chunks, get_standard_config_overrides(config))
    return optimizer, OptimizerParamScheduler(optimizer, **schedule)


def zero_gradients(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Start a new sum of gradients; before the first micro-batch of every step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def optimizer_step(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> tuple[float, bool, float]:
    """Clip, update, advance the schedule by one step; every rank calls it.

    Returns: (norm of the whole gradient before clipping, whether the step was taken, the learning rate
    that it had). With a norm that is not finite nothing is changed, the schedule neither: megatron-core
    looks for such gradients only in float16, and clipping would spread them over all weights.
    """
    learning_rate = float(get_canonical_lr_for_logging(optimizer.param_groups))
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return grad_norm, False, learning_rate
    taken, _, _ = optimizer.step()
    scheduler.step(1)
    return grad_norm, taken, learning_rate


def _schedule_arguments(optim: OptimConfig, num_steps: int | None) -> dict[str, object]:
    """Arguments of Megatron's scheduler, which counts steps from 0.

    Step j of the warm-up, from 0, has (j + 1) / (lr_warmup_steps + 1) of the learning rate: no step is
    spent on a rate of zero.
    """
    warmup, style = optim.lr_warmup_steps, optim.lr_decay_style
    decay = optim.lr_decay_steps if optim.lr_decay_steps is not None else num_steps
    if style == "constant":
        decay = warmup + 1  # not used, but Megatron wants it to be greater than the warm-up
    if decay is None:
        raise ValueError(f"optim.lr_decay_steps is needed for optim.lr_decay_style={style}")
    if warmup >= decay:
        raise ValueError(
            f"optim.lr_warmup_steps={warmup} must be less than optim.lr_decay_steps={decay} "
            "(which is the number of optimizer steps of the run where it is not given)"
        )
    if optim.min_lr > optim.lr:
        raise ValueError(f"optim.min_lr={optim.min_lr} is greater than optim.lr={optim.lr}")
    return {
        "init_lr": optim.lr / (warmup + 1) if warmup else 0.0,
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": style,
        "start_wd": optim.weight_decay,
        "end_wd": optim.weight_decay,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    }
