"""GPU memory other than planned tensors: one term for each cause. None of it was measured by megarl.

- A process's CUDA context, with the kernels that torch and the libraries load: 0.4 to 0.6 GiB on an H100 (torch 2, CUDA 12 and 13, as
  `nvidia-smi` shows it for a process that holds one tensor).
- A communicator of NCCL: the buffers that each of its channels receives into, of all three protocols: NCCL_BUFFSIZE (4 MiB), LL128
  (4.7 MiB) and LL (0.5 MiB; NCCL's src/include/device.h), for the 24 channels of a ring over NVLink on nodes of eight H100s (NVIDIA/nccl,
  src/graph; its documentation of NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS). Rings between nodes have fewer channels, trees have two
  peers more: they count the same. torch makes one for each process group that communicates, and one for each neighbour in the
  pipeline (ProcessGroupNCCL.cpp); SGLang has one of torch's and one of its own for tensor parallel ranks (0.5.21,
  distributed/parallel_state.py).
- An engine's CUDA graphs, as SGLang 0.5.21 reckons itself (`reserve_for_graph_mb` in arg_groups/memory_hook.py): 2 MiB for each request of
  the largest decode graph, 8 MiB for each of 58 prefill graphs, or 1.5 GiB with latent attention.
- An engine's sampler: with a seed for each request it has, for each of them and each token of the vocabulary, logits,
  probabilities and log-probs in float32, a hash of 4 bytes and two float64 (`multinomial_with_seed` in layers/sampler.py, 0.5.21). Validation
  with top_k or top_p takes that; training rollouts, which megarl's own kernels sample, take the logits alone. Where these leave tokens out
  (top_p, top_k, min_p), it has the probabilities as they are, cut and sorted, and their sums, in float32, the sorted tokens in int64, and the
  hash and the two float64 as before.
- An engine that judges texts has no graphs and no sampler. It makes logits of 2048 tokens at a time (SGLANG_LOGPROB_CHUNK_SIZE), up to three times in
  float32: its own rows of the head, those of all ranks, and these in one piece (0.5.21, `_can_borrow_logprob_memory` in
  layers/logprob_processor.py).
- Workspaces: of cuBLAS 32 MiB for each handle and stream on Hopper (torch; two of them), of Transformer Engine 32 MiB for GEMMs and four more
  for grouped ones (pytorch/cpp_extensions/gemm.py, 2.18); SGLang's attention has 384 MiB (SGLANG_FLASHINFER_WORKSPACE_SIZE).
- Fragments: memory that torch's allocator holds and cannot use. An assumption: 1 GiB.

The communicator of weight syncs counts as the others do: the further memory that NCCL keeps for each of its peers (`megarl plan sync`
counts them) has not been measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.layout.grid import ParallelLayout

MIB = 1 << 20
CONTEXT = 512 * MIB
COMMUNICATOR = 24 * (4 + 4.7 + 0.5) * MIB
DECODE_GRAPH, PREFILL_GRAPHS, PREFILL_GRAPHS_MLA = 2 * MIB, 58 * 8 * MIB, 1536 * MIB
MOST_GRAPHED = 512  # requests of the largest decode graph
SAMPLING = 4 + 4 + 4 + 4 + 8 + 8  # bytes of a request's token of the vocabulary
JUDGED_LOGITS = 2048 * 3 * 4  # bytes of a token of the vocabulary
SORTED_SAMPLING = 4 + 4 + 4 + 4 + 8 + 4 + 8 + 8
CUBLAS, TRAINER_WORKSPACE, ENGINE_WORKSPACE = 64 * MIB, 5 * 32 * MIB, 384 * MIB
FRAGMENTS = 1024 * MIB


@dataclass(frozen=True)
class EngineRank:
    """A rank of an engine on the GPU: the engine's ranks, the rank's concurrent requests, and the relevant facts of its model.

    attention_tp: ranks that cut attention. tokens: of a request, for which a pass gives logits: the newest, and drafted ones.
    judges: whether it only judges texts, so that it decodes, captures and samples nothing.
    leaves_out: whether training rollouts sample from a part of the vocabulary.
    """

    tp: int
    requests: int
    vocab_size: int
    latent: bool
    attention_tp: int = 1
    tokens: int = 1
    judges: bool = False
    leaves_out: bool = False


def communicators(layout: ParallelLayout) -> int:
    """Communicators of a rank of Megatron-core 0.19.2 (parallel_state.py): its process groups of several ranks, which all communicate."""
    groups = (
        layout.world,
        layout.tp,
        layout.cp,
        layout.dp * layout.cp,
        layout.tp * layout.pp if layout.pp > 1 else 1,  # of the gradient's norm
        layout.ep,
        layout.etp,
        layout.expert_dp if layout.ep * layout.etp > 1 else 1,
    )
    neighbours = min(2, layout.pp - 1)
    return sum(size > 1 for size in groups) + neighbours


def reserved(
    models: Sequence[ParallelLayout], engine: EngineRank | None, exchanges: int = 0
) -> dict[str, int]:
    """Bytes by cause, of a GPU with a process for each of `models`, and one for a rank of an engine.

    Args:
        exchanges: processes among them that exchange weights with other processes (weight_sync/exchange.py).
    """
    processes, groups = len(models), sum(map(communicators, models)) + exchanges
    workspaces = len(models) * (CUBLAS + TRAINER_WORKSPACE)
    graphs = sampling = logits = 0
    if engine is not None:
        processes += 1
        groups += sum(2 for size in {engine.tp, engine.attention_tp} if size > 1)
        workspaces += CUBLAS + ENGINE_WORKSPACE
        if engine.judges:
            logits = JUDGED_LOGITS * engine.vocab_size
        else:
            graphs = DECODE_GRAPH * min(engine.requests, MOST_GRAPHED)
            graphs += PREFILL_GRAPHS_MLA if engine.latent else PREFILL_GRAPHS
            each = SORTED_SAMPLING if engine.leaves_out else SAMPLING
            sampling = each * engine.requests * engine.tokens * engine.vocab_size
    return {
        f"CUDA contexts: {processes}": processes * CONTEXT,
        f"NCCL communicators: {groups}": round(groups * COMMUNICATOR),
        "CUDA graphs": graphs,
        "sampling": sampling,
        "logits of judged texts": logits,
        "workspaces": workspaces,
        "fragments": FRAGMENTS,
    }
