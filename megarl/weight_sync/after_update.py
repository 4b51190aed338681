"""The parameters are read once more when SGLang has ended an update.

SGLang's `end_weight_update` runs every layer's processing of loaded weights, after the receiver has compared them. It leaves what
megarl's engines hold as it is, and this is what sees to it (sglang 0.5.21).
"""

from typing import Any

from megarl.weight_sync.receiver import RECEIVER, every_rank

_END = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update"
)


def register() -> None:
    """Called in each scheduler process before SGLang runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_END, verified, HookType.AFTER)


def verified(result: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's answer, which refuses where a rank finds other weights than it took: of all ranks that of rank 0 is sent."""
    receiver = getattr(updater.tp_worker.model_runner.model, RECEIVER, None)
    problem = receiver.verify_again() if receiver is not None else None
    problems = [answer["problem"] for answer in every_rank({"problem": problem}, updater.tp_cpu_group)]
    told = [f"{problem} (TP rank {rank})" for rank, problem in enumerate(problems) if problem is not None]
    if result.success and told:
        return type(result)(success=False, message="; ".join(told))
    return result
