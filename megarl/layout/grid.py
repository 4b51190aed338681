"""The coordinates of ranks in a Megatron model's parallel layout: arithmetic alone, no process group, no torch.

Guarantee, with a test of its own: `coords_of` and `layers_of` agree with Megatron's groups and with the
built model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megarl.config.pipeline_layout import parse_layout

if TYPE_CHECKING:
    from megarl.config.schema.commands import MegatronConfig


@dataclass(frozen=True)
class ParallelLayout:
    """How `world` ranks share one model.

    tp, pp, cp: tensor, pipeline and context parallel sizes; the remaining factor of the world is data parallel.
    vpp: model chunks per pipeline stage (interleaved schedule), or None for one.
    sp: sequence parallel: activations between the tensor parallel parts are split along the sequence.
    ep, etp: expert parallel size, and tensor parallel size of each expert; the ranks of a stage that remain hold
        replicas of the experts.
    first_layers, last_layers: layers of the first and the last stage; None: the layers that the others leave are
        shared out evenly.
    chunk_layers: layers of each chunk, first those of all stages' first chunks; None: as the above say.

    Raises ValueError, with the configuration's key, for sizes that do not fit each other.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    sp: bool = False
    ep: int = 1
    etp: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    chunk_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for key, size in (
            ("tensor_model_parallel_size", self.tp),
            ("pipeline_model_parallel_size", self.pp),
            ("context_parallel_size", self.cp),
            ("expert_model_parallel_size", self.ep),
            ("expert_tensor_parallel_size", self.etp),
        ):
            if size < 1:
                raise ValueError(f"megatron.{key} is {size}; it must be at least 1")
        if self.world < 1 or self.world % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"{self.world} devices cannot hold megatron.tensor_model_parallel_size={self.tp} x "
                f"pipeline_model_parallel_size={self.pp} x context_parallel_size={self.cp}; "
                f"a multiple of {self.tp * self.pp * self.cp} is needed"
            )
        if self.world % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"{self.world} devices cannot hold megatron.expert_model_parallel_size={self.ep} x "
                f"expert_tensor_parallel_size={self.etp} x pipeline_model_parallel_size={self.pp}; "
                f"a multiple of {self.etp * self.ep * self.pp} is needed"
            )
        if self.pp == 1 and (self.first_layers, self.last_layers) != (None, None):
            raise ValueError(
                "megatron.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need "
                "megatron.pipeline_model_parallel_size of at least 2"
            )
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            raise ValueError(
                f"megatron.virtual_pipeline_model_parallel_size={self.vpp} with "
                f"pipeline_model_parallel_size={self.pp}: both must be at least 2 (or the first null)"
            )
        if self.chunk_layers is not None:
            if len(self.chunk_layers) != self.pp * (self.vpp or 1):
                raise ValueError(
                    f"megatron.pipeline_model_parallel_layout has {len(self.chunk_layers)} parts; {self.pp * (self.vpp or 1)} are needed"
                )
            if (self.first_layers, self.last_layers) != (None, None):
                raise ValueError(
                    "megatron.pipeline_model_parallel_layout and num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage both "
                    "say how many layers a stage has"
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
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size,
            first_layers=config.num_layers_in_first_pipeline_stage,
            last_layers=config.num_layers_in_last_pipeline_stage,
            chunk_layers=None
            if config.pipeline_model_parallel_layout is None
            else parse_layout(config.pipeline_model_parallel_layout),
        )

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def num_chunks(self) -> int:
        """Model chunks on each rank."""
        return self.vpp or 1

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.etp * self.ep * self.pp)


@dataclass(frozen=True)
class RankCoords:
    """A rank's place in each dimension of a layout."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int = 0
    etp: int = 0


def coords_of(layout: ParallelLayout, rank: int) -> RankCoords:
    """The place of global rank `rank`, in Megatron's order.

    For everything but the experts tp varies fastest, then cp, dp, pp; for the experts etp, ep, their replicas, pp.
    """
    assert 0 <= rank < layout.world, (rank, layout)
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    ep, etp = divmod(rank % (layout.etp * layout.ep), layout.etp)
    return RankCoords(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)


def layers_of(layout: ParallelLayout, num_layers: int, pp_rank: int) -> list[list[int]]:
    """For each model chunk of a pipeline stage the numbers, from 0, of its layers in the full model.

    As in Megatron each stage has its share of the layers, and its chunk c the c-th equal part of that; the layers
    run through the chunks c of all stages before they run through the chunks c + 1.

    Raises:
        ValueError: the layers cannot be shared out.
    """
    return [list(layers) for layers in _layers_of_chunks(layout, num_layers)[pp_rank]]


def sums_of_stages(layout: ParallelLayout, values: Sequence[float]) -> list[float]:
    """By pipeline stage the sum over its layers of `values`, one for each layer of the model. Raises: as `layers_of`."""
    return [
        sum([value for layers in chunks for value in values[layers.start : layers.stop]])
        for chunks in _layers_of_chunks(layout, len(values))
    ]


@lru_cache(maxsize=1024)  # a search for a layout asks some hundred thousand times
def _layers_of_chunks(layout: ParallelLayout, num_layers: int) -> list[list[range]]:
    """By pipeline stage the layers of its chunks."""
    stages = range(layout.pp)
    if layout.chunk_layers is not None:
        return [_given_layers(layout, layout.chunk_layers, num_layers, stage) for stage in stages]
    shares = _layers_of_stages(layout, num_layers)
    turn, found = sum(shares) // layout.num_chunks, []  # layers of the chunks c of all stages
    for stage in stages:
        size, before = shares[stage] // layout.num_chunks, sum(shares[:stage]) // layout.num_chunks
        starts = [chunk * turn + before for chunk in range(layout.num_chunks)]
        found.append([range(start, start + size) for start in starts])
    return found


def _given_layers(
    layout: ParallelLayout, counts: tuple[int, ...], num_layers: int, pp_rank: int
) -> list[range]:
    if sum(counts) != num_layers:
        raise ValueError(
            f"megatron.pipeline_model_parallel_layout has {sum(counts)} layers, the model {num_layers}"
        )
    places = [chunk * layout.pp + pp_rank for chunk in range(layout.num_chunks)]
    return [range(sum(counts[:place]), sum(counts[: place + 1])) for place in places]


def _layers_of_stages(layout: ParallelLayout, num_layers: int) -> list[int]:
    """How many layers each stage has."""
    given = [count for count in (layout.first_layers, layout.last_layers) if count is not None]
    others, left = layout.pp - len(given), num_layers - sum(given)
    chunks = layout.num_chunks
    fits = (
        left >= others  # no stage without a layer
        and all(count % chunks == 0 for count in given)
        and (left % (others * chunks) == 0 if others else left == 0)
    )
    if not fits:
        virtual = f" x virtual_pipeline_model_parallel_size={layout.vpp}" if layout.vpp else ""
        ends = {"first": layout.first_layers, "last": layout.last_layers}
        uneven = [
            f"num_layers_in_{end}_pipeline_stage={count}" for end, count in ends.items() if count is not None
        ]
        raise ValueError(
            f"the model's {num_layers} layers cannot be shared out evenly over "
            f"megatron.pipeline_model_parallel_size={layout.pp}{virtual}{' with ' if uneven else ''}{' and '.join(uneven)}"
        )
    share = left // others if others else 0
    shares = [share] * layout.pp
    if layout.first_layers is not None:
        shares[0] = layout.first_layers
    if layout.last_layers is not None:
        shares[-1] = layout.last_layers
    return shares
