"""A rank of a Megatron role: builds its shards, loads them, runs them forward, trains, saves and profiles them.

Everything here is the same for actor, critic, reference, reward model and supervised training; these differ by the head and the loss
that they pass.

- A checkpoint of a rank has the model's weights; with adapters it has the adapters, the value head, and the identity of the base model.
- Every call of a rank is a range with the method's name: in a trace of torch's profiler, and on CUDA as an NVTX range that
  `nsys profile` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megarl import platform
from megarl.checkpoints import FileFacts, seal_files
from megarl.checkpoints.hf.adapters import (
    AdapterExport,
    adapter_layout,
    adapter_tensors,
    load_adapters,
    write_adapter_config,
)
from megarl.checkpoints.hf.export import Bundle, ExportPlan, read_companions, write_files
from megarl.checkpoints.hf.load import load_hf_weights, load_value_head
from megarl.checkpoints.hf.peft_config import CONFIG_FILE
from megarl.cluster.ranks import RankInfo, meet
from megarl.config import overlaps
from megarl.data.routing import ROUTED_EXPERTS, binary_lists, routing_values
from megarl.data.trajectories import from_lists
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import (
    add_value_head,
    build_model,
    gather_parameters,
    local_parameters,
    runnable,
    unwrap,
    wrap_for_training,
)
from megarl.megatron.checkpoint.checkpoint import (
    BaseModel,
    Loaded,
    RankStates,
    Saving,
    begin_save,
    finish_save,
    identify,
    load_states,
)
from megarl.megatron.checkpoint.places import Places, adapter_places, model_places
from megarl.megatron.float8 import float8_settings
from megarl.megatron.fsdp import gather, release, wrap_sharded
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.layer_spec import layers_text
from megarl.megatron.lora.lora import attach_adapters
from megarl.megatron.lora.merged import ExactWeights, MergedParameters
from megarl.megatron.lora.parameter_sets import parameter_set
from megarl.megatron.muon import whole_matrices
from megarl.megatron.offload import (
    Gradients,
    HostStates,
    Offloadable,
    assert_resident,
    frozen_of,
    gradients_of,
    optimizer_of,
    weights_of,
)
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import (
    MicroBatches,
    PackedBatch,
    Routing,
    arrange_sequences,
    arrange_texts,
    arrange_trajectories,
    unpack,
)
from megarl.megatron.parallel import context_parallel_group, coords, init_parallel
from megarl.megatron.router_replay import (
    RouterReplay,
    layers_of_stages,
    replay_routings,
    routing_shape,
    start_recording,
    take_recorded,
)
from megarl.megatron.shared_prompts import check_model
from megarl.megatron.sparse.learning import IndexerLoss
from megarl.megatron.step import StepResult, forward_only, train_step, with_predictions
from megarl.models import COMPANIONS, ModelConfig, read_model_config
from megarl.models.lora import ADAPTER
from megarl.trainer.workers.dispatch import ModelSpec, RowColumns
from megarl.trainer.workers.nonfinite_source import Names, check_update, find_source
from megarl.util.memory import keep_freed_memory
from megarl.util.plugins import load_plugins
from megarl.util.rendezvous import wait_for_all

# The time for all ranks to read or write a model, as a multiple of the timeout of collectives.
FILE_TIMEOUTS = 10

Share = list[list[int]]
"""The rows of a table that one data parallel rank works on, by micro-batch."""


class ModelWorker:
    """One rank. Every method is called on all ranks of the role at once."""

    sums_prefix = ""  # of the names of its losses' sums
    two_labels = False  # whether a stored head of two labels is read, as a head of one label

    def __init__(self, info: RankInfo, spec: ModelSpec, base: ModelWorker | None = None) -> None:
        """
        Args:
            base: the worker in this process, of the same layout, on whose model the adapters are put; None: the model is loaded.
        """
        self.info, self.spec = info, spec
        if not platform.is_cuda():
            keep_freed_memory()
        if base is None:
            print(f"layers: {self.layers_used()}")
        load_plugins(spec.plugins)
        self.layout = ParallelLayout.from_config(spec.megatron, info.world_size)
        if base is not None:
            self.store = base.store
        else:
            self.store = None if torch.distributed.is_initialized() else meet(info, spec.timeout)
            init_parallel(
                self.layout,
                info.rank,
                info.world_size,
                store=self.store,
                timeout_s=spec.timeout,
                seed=spec.megatron.seed,
            )
        self.coords = coords()
        # With a base model this rank shares its weights and parallel state, and adds adapters and a value head of its own.
        self.config = read_model_config(spec.path)
        self.dtype = platform.resolve_dtype(spec.megatron.dtype)
        # The number of multi-token prediction layers that are trained.
        self.depth = self.config.num_mtp_layers if spec.mtp is not None and spec.optim is not None else 0
        self.adapter = ADAPTER if base is None else f"{ADAPTER}_{spec.head}"
        if base is None:
            self.chunks = self.load(spec.path, spec.head, trainable=spec.optim is not None)
        else:
            self.chunks = unwrap(base.chunks)
            if spec.head == "value":
                add_value_head(self.chunks, spec.megatron.seed)
                if hasattr(self.chunks[-1], "value_head"):
                    self.read_value_head(spec.path, self.chunks[-1].value_head.weight.data)
        if spec.share_prompts is not None:
            model, dropout = unwrap(self.chunks)[0].config, spec.lora.dropout if spec.adapted else 0.0
            check_model(spec.share_prompts, model, self.layout, dropout)
        self.indexer_loss: IndexerLoss | None = None
        if spec.indexer_coef is not None and spec.optim is not None:
            self.indexer_loss = IndexerLoss(self.chunks)
        self.replays: list[RouterReplay] = []
        self.routing: Routing | None = None
        if spec.router_replay is not None:
            self.replays = replay_routings(self.chunks)
            of_stages = layers_of_stages(self.config, self.layout)
            self.routing = Routing(routing_shape(self.config), of_stages[self.coords.pp])
        # Adapters come before the wrapper for training, so that only they get gradients and optimizer states.
        if spec.adapted:
            self._adapt()
        self.places: Places | None = None
        if spec.optim is not None:
            if not spec.adapted:
                # Before the wrapping: Megatron-FSDP changes what Megatron would save.
                self.places = model_places(self.chunks, self.config.vocab_size)
            replicas = self.layout.dp * self.layout.cp
            overlap = overlaps(spec.megatron, replicas, on_gpus=platform.is_cuda(), adapted=spec.adapted)
            self.chunks = wrap_for_training(
                self.chunks,
                overlap_grad_reduce=overlap.gradients,
                overlap_param_gather=overlap.parameters,
                use_distributed_optimizer=spec.megatron.use_distributed_optimizer,
                overrides=spec.megatron.override_ddp_config,
                fsdp=spec.megatron.fsdp,
                matrices=whole_matrices(spec.optim),
            )
            self.optimizer, self.scheduler = build_optimizer(
                self.chunks, spec.optim, num_steps=spec.num_updates
            )
        self.parts = self._parts(owns_model=base is None)
        self.reserved: list[Offloadable] = []
        self.export: ExportPlan | None = None
        self.adapter_export: AdapterExport | None = None
        self.saving: Saving | None = None
        self.profile: torch.profiler.profile | None = None
        self.base_model: BaseModel | None = None  # identified by the first save or load

    def _adapt(self) -> None:
        """Freeze the model but for new adapters and its value head."""
        lora = self.spec.lora
        attach_adapters(
            self.chunks, self.config, self.layout, lora, adapter=self.adapter, seed=self.spec.megatron.seed
        )
        if lora.adapter_path is not None:
            load_adapters(
                lora.adapter_path,
                self.config,
                lora,
                self.layout,
                self.info.rank,
                local_parameters(self.chunks),
                self.adapter,
                self.spec.head,
            )
        if hasattr(self.chunks[-1], "value_head"):
            self.chunks[-1].value_head.requires_grad_(True)

    def _parts(self, *, owns_model: bool) -> dict[str, Offloadable | Gradients | HostStates]:
        """This rank's memory on the device, by its name in the account of memory."""
        parts: dict[str, Offloadable | Gradients | HostStates] = {}
        trained: tuple[torch.nn.Parameter, ...] = ()
        if self.spec.adapted:
            trained = parameter_set(self.chunks, self.adapter).parameters
            parts["adapters"] = Offloadable(lambda: trained)
        if owns_model:
            parts["weights"] = frozen_of(self.chunks, trained) if trained else weights_of(self.chunks)
        if self.spec.optim is not None:
            parts["gradients"] = gradients_of(self.chunks)
            parts["optimizer"] = optimizer_of(self.chunks, self.optimizer)
        return parts

    def layers_used(self) -> str:
        """The layer implementations of the model, as text."""
        return layers_text()

    def own_tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's local tensors with separate adapters; tensors held in float8 are converted on access."""
        return ExactWeights(local_parameters(self.chunks), unwrap(self.chunks))

    def trained_tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's local tensors of the trained model, adapters merged into them, as `local_parameters` names them.

        Called on all ranks at once. Merged tensors are made one by one on access: do not collect them. Shared weights are gathered; callers
        `release` them.
        """
        if not self.spec.adapted:
            gather(self.chunks)
            return local_parameters(self.chunks)
        return MergedParameters(self.chunks, self.adapter)

    def load(self, path: str, head: str, *, trainable: bool) -> list[torch.nn.Module]:
        """A model's chunks on this rank, with the weights of the Hugging Face folder `path`: this rank's own model, or another one."""
        own = path == self.spec.path
        config = self.config if own else read_model_config(path)
        blocks, mtp = self.spec.lora.blocks if own else None, None
        if trainable and self.spec.mtp is not None:
            mtp = "detached" if self.spec.mtp.detached else "attached"
        chunks = build_model(
            config,
            self.layout,
            head=head,
            dtype=self.dtype,
            trainable=trainable,
            recompute_granularity=self.spec.megatron.recompute_granularity if trainable else None,
            recompute_modules=self.spec.megatron.recompute_modules if trainable else None,
            overrides=self._overrides(),
            base_block=blocks,
            mtp=mtp,
            indexers=trainable and self.spec.indexer_coef is not None,
            seed=self.spec.megatron.seed,
        )
        self.read_weights(path, config, head, local_parameters(chunks), blocks, mtp=mtp is not None)
        self.wait_for_ranks(f"the {'trained' if trainable else 'frozen'} {head} model of {path} is loaded")
        if not trainable and self.spec.megatron.fsdp == "optim_grads_params":
            return [wrap_sharded(chunk, self.spec.megatron.fsdp) for chunk in chunks]
        return chunks

    def wait_for_ranks(self, what: str) -> None:
        """Return when all ranks have called this for `what`, once each: before anything collective, since ranks read and write shared files
        at very different speeds.

        Raises:
            TimeoutError: names the ranks that are missing.
        """
        if self.store is not None:
            limit = FILE_TIMEOUTS * self.spec.timeout
            wait_for_all(self.store, what, self.info.rank, self.info.world_size, limit)

    def _overrides(self) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig: from the configuration, for products in float8, and for routing replay."""
        megatron = self.spec.megatron
        given = {**float8_settings(megatron), **(megatron.override_transformer_config or {})}
        # Transformer Engine's kernel chooses experts itself, and would not take the experts of an earlier pass (megatron-core 0.19.2).
        return given if self.spec.router_replay is None else {**given, "moe_router_fusion": False}

    def read_weights(
        self,
        path: str,
        config: ModelConfig,
        head: str,
        parameters: Mapping[str, torch.Tensor],
        blocks: int | None,
        mtp: bool = False,
    ) -> None:
        """Fill this rank's local tensors of a model from its Hugging Face folder; `blocks`, `mtp`: as in `load_hf_weights`."""
        rank, two_labels = self.info.rank, self.two_labels
        load_hf_weights(path, config, self.layout, rank, parameters, head, blocks, mtp, two_labels)

    def read_value_head(self, path: str, weight: torch.Tensor) -> None:
        """Fill a value head that was put on the model of `base`, if the Hugging Face folder has one."""
        load_value_head(path, weight)

    def reserve_memory(self, parts: list[str]) -> None:
        """Begin to reserve host memory for `parts`, which will be released repeatedly; for parts that do not exist yet, after the first
        step."""
        self.reserved = [part for name in parts if isinstance(part := self.parts[name], Offloadable)]
        for part in self.reserved:
            part.reserve()

    def release_memory(self, parts: list[str]) -> None:
        """Free the device memory of `parts` (of `self.parts`)."""
        for part in parts:
            self.parts[part].offload()

    def resume_memory(self, parts: list[str]) -> None:
        """Move `parts` back onto the device with their values; gradients are zeros."""
        for part in parts:
            self.parts[part].reload()

    def return_memory(self) -> None:
        """Give back the device memory that torch keeps for this process's next tensors: other processes need it now."""
        torch.cuda.empty_cache()

    def memory(self) -> list[dict[str, int]]:
        """The bytes of each part on the device, of all their copies on the host ("on_host") and, on a GPU, of everything
        that torch has allocated there ("allocated"); one entry, since the process has one device."""
        found = {name: part.device_bytes() for name, part in self.parts.items()}
        found["on_host"] = sum(part.host_bytes() for part in self.parts.values())
        if platform.is_cuda():
            found["allocated"] = torch.cuda.memory_allocated()
        return [found]

    def start_profile(self) -> None:
        """Begin a trace of everything that this process does with torch."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if platform.is_cuda():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self.profile.start()

    def write_profile(self, path: str) -> None:
        """End the trace, and write a file that ui.perfetto.dev opens, with its folder; OSError: it cannot be written."""
        profile, self.profile = self.profile, None
        assert profile is not None, "start_profile was called"
        profile.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(path)

    @property
    def context_group(self) -> torch.distributed.ProcessGroup | None:
        """The context parallel group; None: there is one rank."""
        return context_parallel_group() if self.layout.cp > 1 else None

    def lm_head(
        self,
        vocab_size: int | None = None,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        **more: Any,
    ) -> Callable:
        """The head of this rank's model, or of another model with `vocab_size` tokens. `more`: arguments of `outputs.lm_head`."""
        return lm_head(
            vocab_size=vocab_size or self.config.vocab_size,
            temperature=temperature,
            chunk_tokens=self.spec.megatron.log_prob_chunk_tokens,
            with_entropy=with_entropy,
            **more,
        )

    def pack_share(
        self,
        table: pa.Table,
        share: Share,
        fields: Sequence[str] = (),
        replayed: bool = True,
        learnt: bool = False,
    ) -> MicroBatches:
        """This rank's part of each micro-batch of trajectories.

        Args:
            replayed: with the engine's experts, if the model replays them.
            learnt: for `train`, with the targets of multi-token prediction layers if they are trained.
        """
        how = {
            "depth": self.depth if learnt else 0,
            "share_prompts": self.spec.share_prompts is not None,
            "routing": self.routing if replayed else None,
            "keeps": self.spec.head == "lm",
        }
        return self._pack(arrange_trajectories, table, share, fields=fields, **how)

    def pack_examples(self, table: pa.Table, share: Share, learnt: bool = False) -> MicroBatches:
        """This rank's part of each micro-batch of SFT examples. `learnt`: as `pack_share`'s."""
        return self._pack(arrange_sequences, table, share, depth=self.depth if learnt else 0)

    def pack_texts(self, table: pa.Table, share: Share) -> MicroBatches:
        """This rank's part of each micro-batch of texts that get one number each."""
        return self._pack(arrange_texts, table, share)

    def _pack(self, arrange: Callable, table: pa.Table, share: Share, **more: object) -> MicroBatches:
        layout, more["multiple"] = self.layout, self.spec.megatron.token_multiple
        arranged = partial(arrange, table, tp=layout.tp, cp=layout.cp, cp_rank=self.coords.cp, **more)
        return MicroBatches(partial(arranged, rows=rows, sequence_parallel=layout.sp) for rows in share)

    def compute_columns(
        self,
        table: pa.Table,
        shares: list[Share],
        pack: Callable[[pa.Table, Share], Sequence[PackedBatch]],
        head: Callable,
        names: Sequence[str],
        chunks: list[torch.nn.Module] | None = None,
        record: bool = False,
        rest: str | None = None,
    ) -> RowColumns | None:
        """Pack this rank's share and run it forward; the head's outputs [tokens, len(names)] as response-aligned columns.

        Args:
            chunks: the model; None: this rank's own.
            rest: the name of a column of all further outputs, as bytes; None: there are none.
            record: whether the experts that the routers choose are returned, as the column ROUTED_EXPERTS.

        Returns: None on ranks whose results another rank returns (all but one of each data parallel rank).
        """
        share, chunks = shares[self.coords.dp], self.chunks if chunks is None else chunks
        batches = pack(table, share)
        assert_resident(chunks)
        if record:
            start_recording(self.replays)
        outputs, experts = forward_only(runnable(chunks), batches, head), None
        if record:
            assert self.routing is not None
            of_stages = layers_of_stages(self.config, self.layout)
            experts = take_recorded(self.replays, batches, of_stages, self.routing.shape, self.layout)
        if self.coords.pp != self.layout.pp - 1:
            return None
        lists: dict[str, list[np.ndarray]] = {name: [] for name in names}
        others: list[np.ndarray] = []
        for batch, output in zip(batches, outputs, strict=True):
            for index, name in enumerate(names):
                values = output.view(batch.num_tokens, -1)[:, index]
                lists[name] += unpack(batch, values, self.context_group)
            if rest is not None:
                others += unpack(
                    batch, output.view(batch.num_tokens, -1)[:, len(names) :], self.context_group
                )
        if self.coords.tp or self.coords.cp:
            return None
        rows = [row for micro in share for row in micro]
        columns = {name: from_lists(values, np.float32) for name, values in lists.items()}
        if rest is not None:
            columns[rest] = binary_lists(others)
        if experts is not None:
            columns[ROUTED_EXPERTS] = routing_values(experts, self.routing.shape)
        return rows, columns

    def train(
        self,
        batches: Sequence[PackedBatch],
        head: Callable,
        loss: Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]],
        names: Names | None = None,
        more: bool = False,
        learnt: int | None = None,
    ) -> StepResult:
        """One optimizer step; equal results on every rank.

        In float16 a step whose gradient overflowed is left out (`ok` is false) and the loss scale lowered.

        Args:
            names: gives the names of the micro-batches' sequences, for the error; None: they have none.
            learnt: the number of tokens, over all ranks, that the step learns from. The losses of multi-token prediction layers and of indexers,
                where these are trained, are means over them; the batches were packed with `learnt`.
            more: leave updated weights to be gathered in the next forward pass (`overlap_param_gather`); the caller ends with
                `gather_parameters`.

        Raises:
            FloatingPointError: the gradient is not finite, in float16 at the least loss scale; weights and optimizer are
                as they were before.
        """
        if self.depth:
            assert learnt is not None and self.spec.mtp is not None
            loss = with_predictions(loss, self.depth, self.spec.mtp.coef / learnt, self.sums_prefix)
        if self.indexer_loss is not None:
            assert learnt is not None and self.spec.indexer_coef is not None
            self.indexer_loss.begin(self.spec.indexer_coef / learnt)
        assert_resident(self.chunks)
        for part in ("weights", "adapters", "gradients", "optimizer"):
            if part in self.parts:
                self.parts[part].require()
        result = train_step(self.chunks, self.optimizer, self.scheduler, batches, head, loss)
        if self.indexer_loss is not None:
            result = replace(result, stats=result.stats | self.indexer_loss.sums(self.sums_prefix))
        if not (more and result.ok):
            gather_parameters(self.chunks)
        if result.ok:
            for reserved in self.reserved:  # the first update makes the optimizer's states
                reserved.reserve()
            self.reserved = []
        why = partial(find_source, self.chunks, batches, head, loss, names)
        check_update(result, self.spec.optim.min_loss_scale, why)
        return result

    def export_plan(self, mtp: bool) -> ExportPlan:
        """How the model is exported. `mtp`: with multi-token prediction layers; the source model's if they are not trained."""
        dtype, trained = platform.torch_dtype(self.config.dtype), mtp and self.depth > 0
        self.export = ExportPlan(
            self.config, self.layout, dtype, mtp=mtp, mtp_trained=trained, head=self.spec.head
        )
        return self.export

    def adapter_plan(self) -> AdapterExport:
        """How the adapters are exported, with the value head if there is one."""
        self.adapter_export = AdapterExport(
            self.config, self.layout, self.spec.lora, self.dtype, adapter=self.adapter, head=self.spec.head
        )
        return self.adapter_export

    def pack_adapters(self) -> Bundle:
        """This rank's slices of the adapters, after `adapter_plan`."""
        assert self.adapter_export is not None
        assert_resident(self.chunks)
        return self.adapter_export.pack(0, self.info.rank, local_parameters(self.chunks))

    def pack_export(self, shard: int) -> Bundle:
        """This rank's slices of a shard file of the Hugging Face checkpoint, after `export_plan`."""
        assert self.export is not None
        assert_resident(self.chunks)
        packed = self.export.pack(shard, self.info.rank, self.trained_tensors())
        if shard == len(self.export.shards) - 1:
            release(self.chunks)
        return packed

    def of_role(self, role: str) -> ModelWorker:
        """The worker of a role that these ranks have; `role`: the name of its folder in checkpoints."""
        return self

    def begin_save(self, folder: str, role: str, *, background: bool) -> None:
        """Begin to save the role's state (`megarl.megatron.checkpoint.checkpoint`) into an empty folder.

        background: files are written from a copy in host memory while the role computes.
        """
        worker = self.of_role(role)
        assert worker.saving is None, f"{role} is being saved"
        worker.saving = begin_save(folder, rank_states(worker), background=background)

    def is_saved(self, role: str) -> bool:
        """Whether `finish_save` would not have to wait for this rank's files."""
        saving = self.of_role(role).saving
        assert saving is not None, f"{role} is not being saved"
        return saving.written.done()

    def finish_save(self, role: str) -> dict[str, FileFacts]:
        """Wait for the save that `begin_save` began.

        Returns: the files that this rank wrote, by name in the folder; they are flushed.

        Raises:
            OSError: a rank could not write.
        """
        worker = self.of_role(role)
        saving, worker.saving = worker.saving, None
        assert saving is not None, f"{role} is not being saved"
        return finish_save(saving, lambda: write_companions(worker, saving.folder))

    def load_checkpoint(self, folder: str, role: str) -> Loaded:
        """Continue with the role's state as it was saved, in any layout.

        Raises:
            ValueError: it does not fit the role's model, or is damaged; names the tensor or file.
        """
        return load_states(folder, rank_states(self.of_role(role)))


def rank_states(worker: ModelWorker) -> RankStates:
    """The states of a worker that are saved and loaded; called on all ranks of the role at once.

    They must be on the device: weights or adapters, and the optimizer.
    """
    assert worker.spec.optim is not None, "a model that is not trained is not saved"
    for part in ("adapters" if worker.spec.adapted else "weights", "optimizer"):
        worker.parts[part].require()
    spec, base = worker.spec, None
    if spec.adapted:
        layout = adapter_layout(worker.config, worker.layout, spec.lora, worker.adapter, spec.head)
        tensors = adapter_tensors(worker.config, spec.lora, spec.head)
        places, base = adapter_places(layout.pieces(worker.info.rank), tensors), _base(worker)
    else:
        assert worker.places is not None
        places = worker.places
    trained = (worker.chunks, worker.optimizer, worker.scheduler, worker.layout)
    return RankStates(*trained, places, spec.megatron.seed, base, worker.wait_for_ranks)


def _base(worker: ModelWorker) -> BaseModel:
    """The model that the adapters are on; one rank looks at its files, once."""
    if worker.base_model is None:
        found = [identify(worker.spec.path) if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(found, src=0)
        worker.base_model = found[0]
    assert worker.base_model is not None
    return worker.base_model


def write_companions(worker: ModelWorker, folder: Path) -> dict[str, FileFacts]:
    """Write the files that tell `megarl convert` the model of a checkpoint; one rank calls it.

    Returns: the files, by name in the folder.

    Raises:
        OSError: the disk is full or not writable.
    """
    spec, companions = worker.spec, folder / COMPANIONS
    source = Path(spec.path).expanduser()
    tokenizer = None if spec.tokenizer is None else Path(spec.tokenizer).expanduser()
    files = read_companions(source, worker.config, worker.dtype, worker.depth > 0, tokenizer=tokenizer)
    write_files(companions, files)
    names = [f"{COMPANIONS}/{name}" for name in files]
    if spec.adapted:
        write_adapter_config(folder, worker.config, spec.lora, spec.path, spec.head)
        names.append(CONFIG_FILE)
    return seal_files(folder, names)


@contextmanager
def named(method: str) -> Iterator[None]:
    """A named range around a call of a rank; costs some microseconds without a profiler."""
    with torch.profiler.record_function(method):
        if not platform.is_cuda():
            yield
            return
        torch.cuda.nvtx.range_push(method)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
