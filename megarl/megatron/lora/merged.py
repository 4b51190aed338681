"""A rank's weights as they are with adapters merged into them, each made when it is asked for.

Guarantee: only the last one is kept, so a caller that keeps none has one merged tensor in addition to the model at a time,
and many slices of one weight cost one merge.
"""

from functools import partial

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel

from megarl.megatron.build import local_parameters, unwrap
from megarl.megatron.lora.adapter import adapters_in, weight_name
from megarl.megatron.lora.fp8_base import ExactWeights
from megarl.models.lora import ADAPTER


class MergedParameters(ExactWeights):
    """`local_parameters` without the adapters' tensors, and with adapters merged into the weights that have any.

    A weight without adapters is the model's own tensor; one with adapters, or held in float8, is a new one, in the type
    in which the model computes.
    Every rank makes one (with DoRA this works out norms, which ranks share); each may then ask for any tensor. It has
    the weights of the time when it was made: make a new one after an update.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel] | list[GPTModel], adapter: str = ADAPTER
    ) -> None:
        """
        Args:
            adapter: the name of the set that is merged; others are left out.
        """
        shown, merges = local_parameters(chunks), {}
        for index, chunk in enumerate(unwrap(chunks)):
            for path, name, module in adapters_in(chunk):
                for kind, _ in module.named_parameters():
                    del shown[f"{index}:{path}.{name}.{kind}"]
                if name != adapter:
                    continue
                layer = chunk.get_submodule(path)
                for expert in module.experts:
                    norms = module.norms(layer, expert) if module.use_dora else None
                    local = f"{index}:{path}.{weight_name(expert)}"
                    merges[local] = partial(module.merged, layer, expert, norms)
        super().__init__(shown, unwrap(chunks))
        self._makers |= merges
