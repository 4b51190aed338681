"""Megatron's optimizer (Adam, or Muon for matrices; distributed or not), its learning rate schedule, loss scaling, and one guarded step.

Guarantees:
- A step whose gradients are not finite changes no weight, no state and no learning rate, and is reported.
- With float16 weights losses are scaled before the backward pass and gradients divided by the same number after it, so
  that small gradients do not vanish (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). Norm, clipping and update
  equal the unscaled gradients'; the scale falls where they overflow and rises where they do not.
"""

import contextlib
import math

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from megarl.config.schema.commands import OptimConfig
from megarl.megatron.checkpoint.states import parts_of, updated_by
from megarl.megatron.cpu import adam
from megarl.megatron.fsdp import is_sharded
from megarl.megatron.host_adam import BUCKET, HostAdam, Slots
from megarl.megatron.muon import layer_wise, settings, whole_matrices


def build_optimizer(
    chunks: list[DistributedDataParallel],
    optim: OptimConfig,
    *,
    num_steps: int | None = None,
    bucket: int = BUCKET,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer and its schedule: AdamW, or Muon with AdamW for non-matrices; weight decay is decoupled, none on 1-D weights (norms, biases).

    Whether it is distributed over data parallel ranks was decided in `wrap_for_training`, which also must know of Muon. With bfloat16
    or float16 parameters it keeps float32 copies, taken here: load weights before, or call
    `optimizer.reload_model_params()` after. With float16 it also has the chunks' losses scaled from now on.
    With `optim.optimizer_cpu_offload` the copies go to the host; while this runs they are on the device in the gradients' place.

    Args:
        num_steps: optimizer steps of the entire run, where `optim.lr_decay_steps` is null.
        bucket: elements whose states are on the device at a time, with `optim.optimizer_cpu_offload`.
    """
    adam.install()
    transformer_config, ddp_config = chunks[0].config, chunks[0].ddp_config
    muon = whole_matrices(optim)
    own = {"optimizer": "adam", "use_distributed_optimizer": ddp_config.use_distributed_optimizer}
    if muon:
        own = settings(optim.muon) | {
            "use_layer_wise_distributed_optimizer": ddp_config.use_distributed_optimizer,
            "overlap_param_gather": ddp_config.overlap_param_gather,
        }
    config = OptimizerConfig(
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=transformer_config.bf16,
        fp16=transformer_config.fp16,
        initial_loss_scale=optim.initial_loss_scale,
        min_loss_scale=optim.min_loss_scale,
        loss_scale_window=optim.loss_scale_window,
        hysteresis=optim.hysteresis,
        params_dtype=transformer_config.params_dtype,
        **own,
    )
    schedule = _schedule_arguments(optim, num_steps)
    overrides = get_standard_config_overrides(config)
    if optim.optimizer_cpu_offload:
        # Megatron makes the float32 copies on the device; gradients, unused until the first pass, make room for them.
        for chunk in chunks:
            chunk.offload_grad_buffers()
        optimizer = get_megatron_optimizer(config, chunks, overrides)
        _keep_on_host(optimizer, bucket)
        for chunk in chunks:
            chunk.restore_grad_buffers()
    else:
        with layer_wise() if muon else contextlib.nullcontext():
            optimizer = get_megatron_optimizer(config, chunks, overrides)
    if config.fp16:
        # The schedules scale the last stage's losses by this function's result; all chunks share the settings.
        transformer_config.grad_scale_func = optimizer.scale_loss
    return optimizer, OptimizerParamScheduler(optimizer, **schedule)


def _keep_on_host(optimizer: MegatronOptimizer, bucket: int) -> None:
    """Keep the states of all the optimizer's parts on the host, with one set of slots."""
    parts = parts_of(optimizer)
    found = [list(updated_by(part)) for part in parts]
    copied = any(main.dtype != parameter.dtype for own in found for parameter, _, main in own)
    slots = Slots(3 if copied else 2, bucket)
    for part, own in zip(parts, found, strict=True):
        host = part.optimizer = HostAdam(part.optimizer, own, slots)
        # Parameters are written from their copies bucket by bucket; Megatron's own functions would look for the copies on the
        # device (0.19.2, which has no public way to leave these out).
        part._copy_main_params_to_model_params = lambda: None
        part._copy_model_params_to_main_params = lambda state_dict=None, host=host: host.read_weights()


def loss_scale(optimizer: MegatronOptimizer) -> float | None:
    """The current loss scale; None where losses have none (float32, bfloat16)."""
    return float(optimizer.get_loss_scale()) if optimizer.config.fp16 else None


def zero_gradients(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Start a new sum of gradients; before the first micro-batch of every step."""
    for chunk in chunks:
        if not is_sharded(chunk):  # its optimizer zeroes them
            chunk.zero_grad_buffer()
    optimizer.zero_grad()


def optimizer_step(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> tuple[float, bool, float]:
    """Clip, update, advance the schedule by one step; every rank calls it.

    Returns: (norm of the full gradient before clipping, without detached multi-token prediction layers, whether the step was taken, its
    learning rate). With a gradient that is not finite nothing is changed but the loss scale, not even the schedule;
    the norm then is NaN or infinite.
    """
    learning_rate = float(get_canonical_lr_for_logging(optimizer.param_groups))
    if optimizer.config.fp16:
        # Megatron looks for such gradients itself where it unscales them, which must be done once only.
        taken, grad_norm, _ = optimizer.step()
        grad_norm = float(grad_norm) if taken else math.nan
        _agree_on_scale(optimizer)
    else:
        # megatron-core looks for them only in float16, and clipping would spread them over all weights.
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        # The norms of detached multi-token prediction layers, which are clipped by a norm of their own.
        others = map(float, optimizer._compute_grad_norms_by_group().values())
        grad_norm = next((norm for norm in others if not math.isfinite(norm)), grad_norm)
        taken = math.isfinite(grad_norm) and optimizer.step()[0]
    if taken:
        scheduler.step(1)
    return grad_norm, taken, learning_rate


def _agree_on_scale(optimizer: ChainedOptimizer) -> None:
    """Give the optimizers of dense and of expert weights the same loss scale again.

    megatron-core 0.19.2 lets each one lower its own where its own gradients overflow, but scales the loss by the first
    one's alone: after an overflow of one of them the others' gradients would be divided by another number.
    """
    scalers = [part.grad_scaler for part in optimizer.chained_optimizers]
    states = [scaler.state_dict() for scaler in scalers]
    # The one that saw an overflow: its scale or its patience has fallen, or its count of good steps.
    lowest = min(
        states,
        key=lambda state: (float(state["scale"]), state["hysteresis_tracker"], state["growth_tracker"]),
    )
    for scaler in scalers:
        scaler.load_state_dict(lowest)


def _schedule_arguments(optim: OptimConfig, num_steps: int | None) -> dict[str, object]:
    """Arguments of Megatron's scheduler, which counts steps from 0.

    Step j of the warm-up, from 0, has (j + 1) / (lr_warmup_steps + 1) of the learning rate: no step is
    spent on a rate of zero.
    """
    warmup, style = optim.lr_warmup_steps, optim.lr_decay_style
    decay = optim.lr_decay_steps if optim.lr_decay_steps is not None else num_steps
    if style == "constant":
        decay = warmup + 1  # not used, but Megatron wants it to be greater than the warm-up
    assert decay is not None and warmup < decay and optim.min_lr <= optim.lr, "checked before the ranks start"
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
