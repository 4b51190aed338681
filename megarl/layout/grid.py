"""Who stands where among the ranks of a Megatron model: arithmetic alone, no process group, no torch.

Guarantee, with a test of its own: `coords_of` and `layers_of` agree with Megatron's groups and with the
built model.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.schema import MegatronConfig


@dataclass(frozen=True)
class ParallelLayout:
    """How `world` ranks share one model.

    tp, pp, cp: tensor, pipeline and context parallel sizes; what remains is data parallel.
    vpp: model chunks per pipeline stage (interleaved schedule), or None for one.
    sp: sequence parallel: activations between the tensor parallel parts are split along the sequence.

    Raises ValueError, with the configuration's key, for sizes that do not fit each other.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    sp: bool = False

    def __post_init__(self) -> None:
        for key, size in (
            ("tensor_model_parallel_size", self.tp),
            ("pipeline_model_parallel_size", self.pp),
            ("context_parallel_size", self.cp),
        ):
            if size < 1:
                raise ValueError(f"megatron.{key} is {size}; it must be at least 1")
        if self.world < 1 or self.world % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"{self.world} devices cannot hold megatron.tensor_model_parallel_size={self.tp} x "
                f"pipeline_model_parallel_size={self.pp} x context_parallel_size={self.cp}; "
                f"a multiple of {self.tp * self.pp * self.cp} is needed"
            )
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            raise ValueError(
                f"megatron.virtual_pipeline_model_parallel_size={self.vpp} with "
                f"pipeline_model_parallel_size={self.pp}: both must be at least 2 (or the first null)"
            )
        if self.sp and self.tp == 1:
            raise ValueError(
                "megatron.sequence_parallel=true needs megatron.tensor_model_parallel_size of at least 2"
            )

    @classmethod
    def from_config(cls, config: "MegatronConfig", world: int) -> "ParallelLayout":
        """The layout that a `megatron:` section asks for on `world` devices."""
        tp = config.tensor_model_parallel_size
        return cls(
            world=world,
            tp=tp,
            pp=config.pipeline_model_parallel_size,
            vpp=config.virtual_pipeline_model_parallel_size,
            cp=config.context_parallel_size,
            sp=tp > 1 if config.sequence_parallel is None else config.sequence_parallel,
        )

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def num_chunks(self) -> int:
        """Model chunks on each rank."""
        return self.vpp or 1


@dataclass(frozen=True)
class RankCoords:
    """A rank's place in each dimension of a layout."""

    tp: int
    pp: int
    cp: int
    dp: int


def coords_of(layout: ParallelLayout, rank: int) -> RankCoords:
    """The place of global rank `rank`, in Megatron's order: tp varies fastest, then cp, dp, pp."""
    assert 0 <= rank < layout.world, (rank, layout)
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return RankCoords(tp=tp, pp=pp, cp=cp, dp=dp)


def layers_of(layout: ParallelLayout, num_layers: int, pp_rank: int) -> list[list[int]]:
    """For each model chunk of a pipeline stage the numbers, from 0, of its layers in the whole model.

    Chunk c of stage p is the (c * pp + p)-th equal share of the layers, as in Megatron.

    Raises:
        ValueError: the layers cannot be shared out evenly.
    """
    shares = layout.pp * layout.num_chunks
    if num_layers % shares:
        virtual = f" x virtual_pipeline_model_parallel_size={layout.vpp}" if layout.vpp else ""
        raise ValueError(
            f"the model's {num_layers} layers cannot be shared out evenly over "
            f"megatron.pipeline_model_parallel_size={layout.pp}{virtual}"
        )
    size = num_layers // shares
    starts = [(chunk * layout.pp + pp_rank) * size for chunk in range(layout.num_chunks)]
    return [list(range(start, start + size)) for start in starts]
