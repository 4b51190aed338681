"""Tiny models of every family, each made once for the whole room."""

from collections.abc import Callable

import pytest

from megarl.data.arithmetic import arithmetic_texts
from megarl.models.tiny import make_tiny_model
from tests.hybrid_engine.shards import TinyModel, read_tiny_model

MTP_FAMILIES = ("deepseek_v3", "glm4_moe", "kimi_k2")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., TinyModel]:
    """family, further options of `make_tiny_model` -> the model. Sizes divide by 8 ranks; 4 layers, and MTP if any."""
    made: dict[tuple, TinyModel] = {}
    texts = arithmetic_texts(20)

    def make(family: str, **options) -> TinyModel:
        key = (family, *sorted((name, repr(value)) for name, value in options.items()))
        if key not in made:
            folder = make_tiny_model(
                tmp_path_factory.mktemp(family),
                texts,
                family=family,
                vocab_size=300,
                hidden_size=32,
                num_attention_heads=8,
                num_key_value_heads=4,
                ffn_hidden_size=64,
                max_position_embeddings=128,
                num_mtp_layers=int(family in MTP_FAMILIES),
                **options,
            )
            made[key] = read_tiny_model(folder)
        return made[key]

    return make
