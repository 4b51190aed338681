"""Ranks that train a tiny model, save their states and resume from them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.dcp import DCPReader
from megarl.checkpoints.hf.load import load_hf_weights
from megarl.config.schema.commands import OptimConfig
from megarl.config.schema.models import MuonConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters, wrap_for_training
from megarl.megatron.checkpoint.checkpoint import RankStates
from megarl.megatron.checkpoint.places import model_places
from megarl.megatron.checkpoint.states import fragments
from megarl.megatron.fsdp import gather, local, release
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.host_adam import BUCKET
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.parallel import init_parallel
from megarl.megatron.sparse.learning import IndexerLoss
from megarl.megatron.step import train_step, with_predictions
from megarl.models import read_model_config
from tests.megatron.parity import NUM_TARGETS, VOCAB, batches, loss_of

OPTIM = OptimConfig(
    lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), clip_grad=0.5, lr_decay_style="linear", lr_decay_steps=50
)


@dataclass(frozen=True)
class Setting:
    """A model in a layout. `distributed`: whether optimizer states are. `on_host`: elements per bucket if these states are on the host.
    `fsdp`: what data parallel ranks shard. `mtp`: with multi-token prediction layers. `indexers`: sparse attention's indexers are trained."""

    world: int
    sizes: dict[str, Any]
    distributed: bool = True
    dtype: torch.dtype = torch.float32
    head: str = "lm"
    on_host: int | None = None
    fsdp: str | None = None
    mtp: bool = False
    muon: bool = False
    indexers: bool = False


class Trainee:
    """This rank's part of a model that is trained."""

    def __init__(self, rank: int, world: int, model: str, setting: Setting, *, seed: int = 1) -> None:
        """With the weights in the folder `model`; with a `seed` other than 1, with random weights that a test overwrites."""
        self.layout = ParallelLayout(world=world, **setting.sizes)
        init_parallel(self.layout, rank, world, seed=seed)
        config = read_model_config(model)
        self.depth = config.num_mtp_layers if setting.mtp else 0
        options = {"dtype": setting.dtype, "head": setting.head, "seed": seed, "indexers": setting.indexers}
        chunks = build_model(config, self.layout, mtp="detached" if setting.mtp else None, **options)
        if seed == 1:
            given = (rank, local_parameters(chunks), setting.head)
            load_hf_weights(model, config, self.layout, *given, mtp=setting.mtp)
        self.indexer_loss = IndexerLoss(chunks) if setting.indexers else None
        places = model_places(chunks, VOCAB)
        self.chunks = wrap_for_training(
            chunks, use_distributed_optimizer=setting.distributed, fsdp=setting.fsdp, matrices=setting.muon
        )
        optim = replace(OPTIM, optimizer_cpu_offload=setting.on_host is not None)
        if setting.muon:
            optim = replace(optim, optimizer="muon", muon=MuonConfig(ns_dtype="float32"))
        bucket = setting.on_host or BUCKET
        self.optimizer, self.scheduler = build_optimizer(self.chunks, optim, bucket=bucket)
        self.states = RankStates(self.chunks, self.optimizer, self.scheduler, self.layout, places, seed=7)

    def steps(self, count: int) -> list[tuple[float, float, float]]:
        """(Loss, gradient norm, learning rate) of `count` steps."""
        head, history, loss = lm_head(vocab_size=VOCAB, chunk_tokens=16), [], loss_of
        if self.depth:
            loss = with_predictions(loss_of, self.depth, 0.3 / NUM_TARGETS, "")
        for _ in range(count):
            micro_batches = batches(self.layout, self.depth)
            if self.indexer_loss is not None:
                self.indexer_loss.begin(1 / NUM_TARGETS)
            result = train_step(self.chunks, self.optimizer, self.scheduler, micro_batches, head, loss)
            assert result.ok
            history.append((result.stats["loss"], result.grad_norm, result.lr))
        return history

    def hashes(self) -> dict[str, str]:
        """Hashes of this rank's weights, optimizer states and random state."""
        return {name: digest(tensor) for name, tensor in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        gather(self.chunks)
        yield from local_parameters(self.chunks).items()
        release(self.chunks)
        for index, fragment in enumerate(fragments(self.optimizer)):
            yield f"main {index}", local(fragment.main)
            yield from ((f"{kind} {index}", local(tensor)) for kind, tensor in fragment.state.items())
        yield "random", torch.get_rng_state()


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def whole_tensors(folder: str | Path, vocab_size: int = VOCAB) -> dict[str, torch.Tensor]:
    """The global tensors of a checkpoint, without the vocabulary's padding; each element must be stored once."""
    reader, found = DCPReader(Path(folder)), {}
    for key, stored in reader.tensors.items():
        whole, seen = (
            torch.zeros(stored.shape, dtype=stored.dtype),
            torch.zeros(stored.shape, dtype=torch.int8),
        )
        for chunk in stored.chunks:
            whole[chunk.box.slices] = reader.load(chunk)
            seen[chunk.box.slices] += 1
        assert (seen == 1).all(), key
        found[key] = whole[:vocab_size] if "word_embeddings" in key or "output_layer" in key else whole
    return found
