"""Trainer ranks in the test's process that send a model with PEFT's adapters to a real engine."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.models.lora import adapted_layers, adapted_weights, scaling
from megarl.rollout.engine import AdapterConfig, SyncReport
from megarl.weight_sync.layouts import EngineLayout, megatron_adapters, megatron_layout
from megarl.weight_sync.receiver import InboxFile
from megarl.weight_sync.sync_plan import SyncPlan
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import TamperingOutbox
from tests.weight_sync.shards import empty_shards, load_all

Tensors = Mapping[str, torch.Tensor]
BUCKET = 4_000  # bytes; small, so that the adapters fill several buckets


def peft_model(folder: Path, lora: LoraConfig, seed: int) -> Any:
    """The folder's model with random PEFT adapters; its greedy answers differ from those of the model without adapters."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        PeftConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules="all-linear"
            if lora.target_modules == ("all-linear",)
            else list(lora.target_modules),
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
        ),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    """The adapters by the names that they have in files, without PEFT's prefix."""
    return {
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace("vector.weight", "vector"): parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def engine_adapters(folder: Path, lora: LoraConfig) -> AdapterConfig:
    layers = adapted_layers(adapted_weights(read_model_config(str(folder)), lora))
    return AdapterConfig(lora.rank, scaling(lora), layers)


class AdapterTrainer:
    """`ranks[rank]`: the local tensors of each trainer rank; `put` changes the adapters among them."""

    def __init__(
        self,
        folder: Path,
        lora: LoraConfig | None,
        parallel: ParallelLayout,
        tp: int,
        inboxes: Path,
        ranks: Sequence[Tensors] | None = None,
        **more: Any,
    ) -> None:
        """
        Args:
            lora: configuration of the adapters that the engine serves; None: the adapters are merged into the weights.
            inboxes: the folder for the files from which the engine's ranks learn the addresses of the outboxes.
            ranks: each trainer rank's local tensors; None: the tensors of the folder's model, with adapters of zeros.
        """
        config = read_model_config(str(folder))
        self.sync = SyncPlan(config, parallel, EngineLayout(tp), torch.float32, BUCKET, adapters=lora, **more)
        self._layout = None
        if lora is not None:
            self._layout = megatron_adapters(megatron_layout(config, parallel), config, lora)
        self.ranks = list(ranks) if ranks is not None else load_all(folder, parallel)
        if self._layout is not None and ranks is None:
            for tensors, adapters in zip(self.ranks, empty_shards(self._layout), strict=True):
                tensors |= {name: torch.zeros_like(tensor) for name, tensor in adapters.items()}
        sources, targets = self.sync.shares()
        self._short = TemporaryDirectory()
        self.outboxes = [
            TamperingOutbox(share, self._short.name, "127.0.0.1", "cpu", 60.0) for share in sources
        ]
        addresses = {outbox.address.rank: outbox.address for outbox in self.outboxes}
        hub = self.outboxes[0].address.hub
        for outbox in self.outboxes if hub is not None else ():
            outbox.join(hub)
        inboxes.mkdir(exist_ok=True)
        self.inboxes = [inboxes / f"inbox-{rank}" for rank in range(tp)]
        for target, inbox in zip(targets, self.inboxes, strict=True):
            InboxFile(target, addresses, hub, 60.0).write(inbox)
        self._threads = ThreadPoolExecutor(len(sources))

    def put(self, adapters: Tensors) -> None:
        assert self._layout is not None
        for rank, tensors in enumerate(self.ranks):
            for tensor, box, local, place in self._layout.pieces(rank):
                tensors[local][place.slices].copy_(adapters[tensor][box.slices])

    def run(self, engine: EngineProcess, version: int, complete: bool = True, **more: Any) -> SyncReport:
        """Send a version; raises what the engine refuses."""
        engine.call("begin_update", version)
        sending = [
            self._threads.submit(outbox.send, version, tensors, complete=complete, **more)
            for outbox, tensors in zip(self.outboxes, self.ranks, strict=True)
        ]
        try:
            engine.call("receive_weights", complete)
        finally:
            self.sent = [future.result() for future in sending]
        return engine.call("finish_update")

    def tamper(self, change: Callable[..., bool | None]) -> None:
        """Call `change(token, packet)` for each packet that is sent from now on."""
        for outbox in self.outboxes:
            outbox.tamper = change

    def close(self) -> None:
        for outbox in self.outboxes:
            outbox.close()
        self._threads.shutdown()
        self._short.cleanup()
