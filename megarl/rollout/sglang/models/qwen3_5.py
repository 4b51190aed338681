"""SGLang's classes for Qwen3.5's language models, alone or out of a folder with a vision tower, which is not made.

SGLang 0.5.21 has them for folders of a language model alone (srt/models/qwen3_5_text.py).
"""

from collections.abc import Iterable
from typing import Any

from sglang.srt.models import qwen3_5_text
from torch import Tensor

_OF_TEXT, _OF_PICTURES = "model.language_model.", "model.visual."


def _own(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in weights:
        if not name.startswith(_OF_PICTURES):
            yield name.replace(_OF_TEXT, "model.", 1), tensor


class Qwen3_5ForCausalLM(qwen3_5_text.Qwen3_5ForCausalLM):
    """The name is the one that SGLang looks for. `config`: with or without a vision tower's."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config.get_text_config(), *args, **options)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(_own(weights))


class Qwen3_5MoeForCausalLM(qwen3_5_text.Qwen3_5MoeForCausalLM):
    """As `Qwen3_5ForCausalLM`."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config.get_text_config(), *args, **options)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(_own(weights))

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> Any:
        return super().get_model_config_for_expert_location(config.get_text_config())


EntryClass = [Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM]
