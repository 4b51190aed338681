"""Lets an installed verl 0.5.0 train on a CPU, which it does not as shipped: python verl_on_cpu.py, in verl's environment.

Each edit names a file, what stands there and what is put in its place. They change where tensors live, how processes talk
and that numbers are float32, and have each step reported; nothing of the algorithm. Done twice it changes nothing.
"""

import importlib.util
from pathlib import Path

SDPA = ('attn_implementation="flash_attention_2"', 'attn_implementation="sdpa"')
FLOAT32 = ("dtype=torch.bfloat16)", "dtype=torch.bfloat16, enabled=False)")
CPU_DEVICE = """

def get_nccl_backend() -> str:
    return "gloo"


def _nothing(*args, **kwargs):
    return 0


for _name in ("empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved",
              "set_device", "manual_seed"):
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _nothing)
if not hasattr(torch.cpu, "mem_get_info"):
    torch.cpu.mem_get_info = lambda *args: (1, 1)
if not hasattr(torch.cpu, "get_device_name"):
    torch.cpu.get_device_name = lambda *args: "cpu"
"""
REPORT = """                logger_instance.log(data=data, step=step)
        if "timing_s/step" in data:
            import json
            import time

            now = time.time()
            line = {
                "begin": now - float(data["timing_s/step"]),
                "end": now,
                "phases": {k[9:]: float(v) for k, v in data.items() if k.startswith("timing_s/")},
                "reward": float(data["critic/score/mean"]),
                "response_tokens": float(data["response_length/mean"]),
            }
            print("PEERS-STEP " + json.dumps(line), flush=True)
"""
EDITS = {
    "workers/fsdp_workers.py": [
        ('backend=f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"', 'backend="gloo"'),
        SDPA,
    ],
    "workers/actor/dp_actor.py": [FLOAT32],
    "workers/critic/dp_critic.py": [FLOAT32],
    # The trainer has repeated each prompt already.
    "workers/rollout/hf_rollout.py": [
        FLOAT32,
        ('"num_return_sequences": self.config.n,', '"num_return_sequences": 1,'),
    ],
    "trainer/ppo/ray_trainer.py": [
        ("use_gpu=True, max_colocate_count=1", "use_gpu=False, max_colocate_count=1"),
        ("        self._check_resource_available()\n", ""),
    ],
    "utils/model.py": [SDPA],
    "utils/tracking.py": [("                logger_instance.log(data=data, step=step)\n", REPORT)],
}


def edit(folder: Path) -> None:
    """Make all edits in verl's folder, from the files as they were installed."""
    for name, pairs in EDITS.items():
        text = original(folder / name)
        for found, instead in pairs:
            if found not in text:
                raise ValueError(f"{folder / name} has no {found!r}: this is not verl 0.5.0")
            text = text.replace(found, instead)
        (folder / name).write_text(text)
    device = folder / "utils/device.py"
    device.write_text(original(device) + CPU_DEVICE)


def original(file: Path) -> str:
    """The text of a file as it was before the first edit, which is kept next to it."""
    kept = file.with_suffix(".py.installed")
    if not kept.exists():
        kept.write_text(file.read_text())
    return kept.read_text()


if __name__ == "__main__":
    edit(Path(importlib.util.find_spec("verl").submodule_search_locations[0]))
