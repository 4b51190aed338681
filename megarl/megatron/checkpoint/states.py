"""A rank's states other than weights, as they are saved and restored: optimizers, schedule, loss scale and random numbers.

Random numbers continue exactly, or start anew where another layout or kind of device has other streams.
"""

import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megarl import platform
from megarl.megatron.checkpoint.places import OPTIMIZER, Item, Places, pieces_by_tensor, range_items
from megarl.megatron.fsdp import first_element, local
from megarl.megatron.host_adam import MOMENTS, HostAdam, Updated
from megarl.megatron.lora.adapter import OWN, start_streams
from megarl.megatron.muon import MOMENTUM, is_muon

MAIN = "fp32_param"  # Megatron's name for the float32 copy of a weight


class Fragment(NamedTuple):
    """An optimizer's part of a parameter: the elements from `start` on.

    Attributes:
        main: the tensor that is updated: these elements themselves, or their float32 copy (which may be on the host); with
            Megatron-FSDP a tensor over all ranks whose `local` part they are.
        state: the optimizer's, of `main`.
        kinds: names of the states that it has after a step.
    """

    parameter: torch.nn.Parameter
    start: int
    main: torch.Tensor
    state: dict[str, Any]
    kinds: tuple[str, ...] = MOMENTS


def fragments(optimizer: MegatronOptimizer) -> Iterator[Fragment]:
    """The fragments of all parameters that this rank's optimizers update."""
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, HostAdam):
            yield from (Fragment(*found) for found in part.optimizer.fragments())
            continue
        kinds = (MOMENTUM,) if is_muon(part.optimizer) else MOMENTS
        for parameter, start, main in updated_by(part):
            yield Fragment(parameter, start, main, part.optimizer.state[main], kinds)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of dense weights and of experts, of matrices and of others; one without parameters on this rank is left out."""
    if isinstance(optimizer, ChainedOptimizer):
        return [part for chained in optimizer.chained_optimizers for part in parts_of(chained)]
    return [optimizer] if optimizer.optimizer is not None else []


def updated_by(part: MegatronOptimizer) -> Iterator[Updated]:
    """Parameter, first element, and the tensor that is updated for it."""
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer) and part.ddp_config.use_megatron_fsdp:
        for main in (main for group in groups for main in group["params"]):
            yield main.orig_param, first_element(main), main
    elif isinstance(part, DistributedOptimizer):
        # Not by `model_param_group_index_map`, whose order is another one where a group has weights of two types (0.19.2).
        mains = {
            parameter: main
            for ours, held in (
                (part.model_fp32_groups, part.shard_fp32_groups),
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            )
            for group, own in zip(ours, held, strict=True)
            for parameter, main in zip(group, own, strict=True)
        }
        for parameter in part.model_param_group_index_map:
            # No public function tells the range (0.19.2).
            elements = part._get_model_param_range_map(parameter)["param"]
            main = mains[parameter]
            assert main.numel() == elements.size, (main.shape, elements)
            yield parameter, elements.start, main
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for ours, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((parameter, 0, main) for parameter, main in zip(ours, mains, strict=True))
        for group in part.fp32_from_fp32_groups:
            yield from ((parameter, 0, parameter) for parameter in group)
    else:
        assert isinstance(part, FP32Optimizer), part
        yield from ((parameter, 0, parameter) for group in groups for parameter in group["params"])


def num_steps(optimizer: MegatronOptimizer) -> int:
    """How often this rank's Adam has updated; 0 where it has nothing to update. (Muon does not count.)"""
    counts = [
        int(group.get("step", 0)) for part in parts_of(optimizer) for group in part.optimizer.param_groups
    ]
    return max(counts, default=0)


def set_num_steps(optimizer: MegatronOptimizer, count: int) -> None:
    """Set the optimizer to `count` updates, with states to be filled."""
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            group.pop("step", None)
            if count and group["params"] and not is_muon(part.optimizer):
                group["step"] = count
        if isinstance(part.optimizer, HostAdam):
            part.optimizer.set_filled(count > 0)
    for fragment in fragments(optimizer):
        if count == 0:
            fragment.state.clear()
        # Adam has made no states of a part that is empty, which only Megatron-FSDP has.
        for kind in fragment.kinds if count and local(fragment.main).numel() else ():
            if kind not in fragment.state:
                fragment.state[kind] = torch.zeros_like(fragment.main)


def optimizer_items(
    optimizer: MegatronOptimizer, places: Places, names: Mapping[torch.nn.Parameter, str]
) -> Iterator[Item]:
    """The states of this rank's optimizers other than weights. `names`: as `places` calls the parameters."""
    pieces = pieces_by_tensor(places)
    for parameter, start, main, state, names_of in fragments(optimizer):
        found = {kind: state[kind] for kind in names_of if kind in state}
        if main.dtype != parameter.dtype:
            found[MAIN] = main
        for kind, values in found.items():
            own = pieces[names[parameter]]
            flat = local(values).detach().view(-1)
            yield from range_items(f"{OPTIMIZER}{kind}.", places, own, tuple(parameter.shape), start, flat)


def scaler_state(optimizer: MegatronOptimizer) -> dict[str, float] | None:
    """The state of the loss scale, which is one for all parts (`optimizer_step`); None where losses are not scaled, or
    nothing is trained on this rank."""
    parts = parts_of(optimizer)
    if not optimizer.config.fp16 or not parts:
        return None
    state = parts[0].grad_scaler.state_dict()
    return {name: float(value) if name == "scale" else int(value) for name, value in state.items()}


def set_scaler_state(optimizer: MegatronOptimizer, state: Mapping[str, float]) -> None:
    """Continue with a loss scale."""
    scale = torch.tensor([state["scale"]], dtype=torch.float32, device=platform.device())
    # Also of parts without parameters on this rank: the first part's scales the loss.
    for part in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        part.grad_scaler.load_state_dict(dict(state) | {"scale": scale.clone()})


def set_schedule(scheduler: OptimizerParamScheduler, count: int) -> None:
    """Put the schedule at its position after so many steps; its rates come from the configuration."""
    scheduler.num_steps = count
    scheduler.step(0)


def random_states() -> dict[str, Any]:
    """The random states of torch on the host and the device, of Megatron's streams and the adapters', of Python and of numpy: tensors and
    plain types, which load without unpickling anything else."""
    state: Any = np.random.get_state()
    kind, keys, at, has_gauss, gauss = state
    states = {
        "torch": torch.get_rng_state(),
        "streams": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), at, has_gauss, gauss),
    }
    if platform.is_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def of_this_device(states: Mapping[str, Any]) -> bool:
    """Whether `random_states` gave these states on the kind of device that is here: states of a GPU's generator, which Megatron's streams also
    are, have another form than those of a CPU's."""
    return ("cuda" in states) == platform.is_cuda()


def set_random_states(states: dict[str, Any]) -> None:
    """Continue with states that `random_states` gave on this kind of device; streams that were begun since go on as they are."""
    torch.set_rng_state(states["torch"])
    if platform.is_cuda():
        torch.cuda.set_rng_state(states["cuda"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states(tracker.get_states() | states["streams"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


def restart_random_states(seed: int, step: int) -> None:
    """Begin all streams anew, from numbers that follow from `seed` and the number of steps."""
    seed = zlib.crc32(f"{seed} {step}".encode())
    begun = get_cuda_rng_tracker().get_states()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    if OWN in begun:
        start_streams(seed)
