"""A small model's facts, and those of special kinds of models, for tests of what fits a model."""

from dataclasses import dataclass, replace

from megarl.models.config import DeltaNetConfig, IndexerConfig, MLAConfig, MoEConfig


@dataclass(frozen=True)
class Facts:
    num_layers: int = 4
    num_attention_heads: int = 8
    num_query_groups: int = 8
    head_dim: int = 128
    output_gate: bool = False
    ffn_hidden_size: int = 64
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    indexer: IndexerConfig | None = None
    delta_net: DeltaNetConfig | None = None
    num_mtp_layers: int = 0
    fp8_block: tuple[int, int] | None = None
    scaled_channels: bool = False
    max_position_embeddings: int = 1024
    context_length: tuple[str, int] = ("max_position_embeddings", 1024)
    family: str = "qwen3_moe"
    data_parallel_attention: bool = True
    vocab_size: int = 640
    tie_word_embeddings: bool = False


MOE = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=48, shared_ffn_hidden_size=48, dense_layers=(0,))

GPT_OSS = Facts(family="gpt_oss", moe=replace(MOE, biases=True, clamp=7.0, dense_layers=()))

MLA = MLAConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)

NET = DeltaNetConfig((0, 1, 2), key_heads=8, value_heads=16, key_dim=8, value_dim=8, conv=4)

SPARSE = Facts(indexer=IndexerConfig((0, 1, 2, 3), heads=2, head_dim=8, topk=128, interleaved=True))
