"""Folders of adapters as PEFT writes them, and models as PEFT loads them from such a folder."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.checkpoints.hf.adapters import (
    AdapterExport,
    adapter_layout,
    load_adapters,
    write_peft_adapter,
)
from megarl.config.schema.models import ALL_LINEAR, LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.models.lora import adapted_weights
from tests.weight_sync.shards import empty_shards

PREFIX = "base_model.model."


def base_model(folder: str | Path, head: str = "lm") -> Any:
    """The model of a folder; each caller gets a copy."""
    changed = tuple(file.stat().st_mtime_ns for file in sorted(Path(folder).iterdir()))
    return deepcopy(_read_model(str(folder), head, changed))


@lru_cache(maxsize=16)
def _read_model(folder: str, head: str, changed: tuple[int, ...]) -> Any:
    """Cached: transformers takes a tenth of a second for a tiny model. `changed`: when the files were last changed."""
    kind = AutoModelForSequenceClassification if head == "value" else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def save_with_peft(folder: str | Path, lora: LoraConfig, target: Path, head: str = "lm") -> Any:
    """Give the model random adapters of PEFT, and have PEFT write them; returns the model."""
    torch.manual_seed(11)
    modules = list(lora.target_modules)
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.rank if lora.alpha is None else lora.alpha,
        target_modules=ALL_LINEAR if modules == [ALL_LINEAR] else modules,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        task_type="SEQ_CLS" if head == "value" else "CAUSAL_LM",
    )
    model = get_peft_model(base_model(folder, head), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(target)
    return model.eval()


def load_with_peft(folder: str | Path, adapter: str | Path, head: str = "lm") -> Any:
    """The model with the adapters of a folder; no tensor may be missing or left over."""
    config = PeftConfig.from_pretrained(adapter)
    model = PeftModel(base_model(folder, head), config)
    result = model.load_adapter(str(adapter), adapter_name="default")
    assert not result.missing_keys and not result.unexpected_keys, result
    return model.eval()


def tensors_in(adapter: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder as PEFT reads them, without the prefix."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in load_peft_weights(str(adapter)).items()}


def write_random(
    folder: str | Path,
    lora: LoraConfig,
    target: str | Path,
    head: str = "lm",
    layout: ParallelLayout | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Have the ranks of a layout write random adapters; returns these, by rank and local name."""
    config, layout = read_model_config(str(folder)), layout or ParallelLayout(world=1)
    assert layout.world == 1, "what ranks have in common would differ"
    ranks = empty_shards(adapter_layout(config, layout, lora, head=head))
    generator = torch.Generator().manual_seed(3)
    for tensors in ranks:
        for name, tensor in tensors.items():
            tensor.normal_(0.0, 0.1, generator=generator)
            if name.rpartition(".")[2].startswith("m"):  # magnitudes
                tensor.abs_().add_(0.5)
    write(folder, lora, target, ranks, layout, head)
    return ranks


def write(
    folder: str | Path,
    lora: LoraConfig,
    target: str | Path,
    ranks: list[dict[str, torch.Tensor]],
    layout: ParallelLayout,
    head: str = "lm",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Have the ranks of a layout write their adapters."""
    plan = AdapterExport(read_model_config(str(folder)), layout, lora, dtype, head=head)
    bundles = [plan.pack(0, rank, tensors) for rank, tensors in enumerate(ranks)]
    write_peft_adapter(str(target), str(folder), plan, bundles)


def load(
    adapter: str | Path, model: str | Path, lora: LoraConfig, layout: ParallelLayout, head: str = "lm"
) -> list[dict[str, torch.Tensor]]:
    """The adapters of each rank of a layout after it has read the folder."""
    config = read_model_config(str(model))
    ranks = empty_shards(adapter_layout(config, layout, lora, head=head))
    for rank, tensors in enumerate(ranks):
        load_adapters(str(adapter), config, lora, layout, rank, tensors, head=head)
        assert not any(tensor.isnan().any() for tensor in tensors.values())
    return ranks


def merged(
    state: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], folder: str | Path, lora: LoraConfig
) -> dict[str, torch.Tensor]:
    """A model's weights with adapters merged by the papers' formulas (arXiv:2106.09685, 2312.03732, 2402.09353 eq. 5)."""
    alpha = lora.rank if lora.alpha is None else lora.alpha
    factor = alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank)
    found = dict(state)
    for weight in adapted_weights(read_model_config(str(folder)), lora):
        module = weight.removesuffix(".weight")
        a, b = adapter[f"{module}.lora_A.weight"].double(), adapter[f"{module}.lora_B.weight"].double()
        moved = state[weight].double() + factor * (b @ a)
        if lora.use_dora:
            norms = moved.square().sum(1, keepdim=True).sqrt()
            moved = adapter[f"{module}.lora_magnitude_vector"].double()[:, None] * moved / norms
        found[weight] = moved.to(state[weight].dtype)
    return found
