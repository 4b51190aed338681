"""Keys and values of a decode batch, kept from step to step; attention.py plugs it into SGLang.

It is for engines that need not be deterministic. While the same sequences run, each step adds one token to their keys and
values. From a batch's second step on these are kept outside of SGLang's cache, in the order in which attention reads them, and attended
by two batched products, instead of gathering the KV cache anew at each step. Sequences end at the same column, so that a step writes
one column; shorter ones begin later. A token's sums thus depend, in their last bits, on the lengths of the other sequences.
"""

import math
from dataclasses import dataclass, field

import torch

from megarl.sglang_cpu.batched_attention import take_slots

MAX_BYTES = 1 << 28  # of all layers; a larger batch is gathered
ROOM = 64  # columns for the tokens to come


@dataclass
class RunningBatch:
    """The sequences of a decode batch, and their keys and values. One for all layers of a model.

    Attributes:
        bytes_per_token: of all layers' keys and values, in float32.
        rows: [n], the sequences' rows in SGLang's table of slots, as of the last step.
        lengths: [n], their tokens then, the new one included.
        places: [n], their indices among the N kept sequences; None: the kept sequences are these, in this order. Sequences that have
            ended are attended needlessly, until they are half of N.
        end: number of filled columns; 0: nothing is kept.
        slots: [N, columns], cache slots of the tokens that existed when the batch began to be kept.
        newest: [n], cache slots of the newest tokens.
        mask: [N, 1, columns + ROOM], -inf before a sequence's beginning; None: all begin at the first column.
        kept: by a layer's cache, keys and values, each [N, key heads, columns + ROOM, dim].
    """

    bytes_per_token: int
    rows: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    places: torch.Tensor | None = None
    end: int = 0
    slots: torch.Tensor | None = None
    newest: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _memory: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # of `kept`, for the next batch

    def step(self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor) -> bool:
        """Begin a decode step. Returns: whether its sequences are attended here.

        Args:
            rows, lengths: as the attributes.
            req_to_token: [requests, context], cache slot of each token of each request.
        """
        stayed = self._stayed(rows, lengths)
        self.rows, self.lengths = rows.clone(), lengths.clone()
        if stayed is None:
            self.end, self.kept = 0, {}
            return False
        if self.end and len(rows) < len(stayed):
            places = torch.arange(len(stayed)) if self.places is None else self.places
            self.places = places[stayed]
        if not 0 < self.end < self.capacity or 2 * len(rows) <= len(self.slots):
            return self._begin(req_to_token)
        self.end += 1
        self.newest = req_to_token[rows, lengths - 1]
        return True

    @property
    def capacity(self) -> int:
        return self.slots.shape[1] + ROOM

    def forget(self) -> None:
        """Free all kept keys and values: another batch comes, or the cache is emptied."""
        self.rows = self.lengths = self.places = self.slots = self.newest = self.mask = None
        self.end, self.kept, self._memory = 0, {}, {}

    def _stayed(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Which of the last step's sequences are in `rows`, bool [sequences of the last step]; None: `rows` has others."""
        if self.rows is None or len(rows) > len(self.rows):
            return None
        stayed = self.rows == rows if len(rows) == len(self.rows) else torch.isin(self.rows, rows)
        same = torch.equal(self.rows[stayed], rows) and torch.equal(self.lengths[stayed] + 1, lengths)
        return stayed if same else None

    def _begin(self, req_to_token: torch.Tensor) -> bool:
        longest = int(self.lengths.max())
        self.end, self.kept, self.places = 0, {}, None
        columns = len(self.rows) * (longest + ROOM)
        if columns * self.bytes_per_token > MAX_BYTES:
            return False
        if len(self.rows) * longest > 2 * int(self.lengths.sum()):
            return False  # most of it would be padding
        column = torch.arange(longest) - (longest - self.lengths[:, None])
        self.slots = req_to_token[self.rows[:, None], column.clamp(min=0)].to(torch.int64)
        self.end, self.mask = longest, None
        if int(self.lengths.min()) < longest:
            hidden = torch.nn.functional.pad(column < 0, (0, ROOM), value=False)
            self.mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None]
        return True

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of the new token of each sequence, in a layer; its keys and values are in the cache.

        Args:
            query: [n, heads, dim], float32; heads of a group share a key head.
            keys: [slots, key heads, dim]; values: [slots, key heads, value dim]: the layer's cache.
            new: keys and values of the new tokens, [n, key heads, dim]; None: they are looked up there.

        Returns:
            [n, heads, value dim].
        """
        k, v = self._with_new_token((keys, values), new)
        (kept, num_kv), (heads, dim) = k.shape[:2], query.shape[1:]
        query = query * (dim**-0.5 if scale is None else scale)
        if self.places is not None:
            query = query.new_zeros(kept, heads, dim).index_copy_(0, self.places, query)
        query = query.view(kept * num_kv, heads // num_kv, dim)
        scores = torch.bmm(query, k.flatten(0, 1)[:, : self.end].transpose(1, 2))
        if self.mask is not None:
            scores.view(kept, heads, self.end).add_(self.mask[:, :, : self.end])
        out = torch.bmm(scores.softmax(-1), v.flatten(0, 1)[:, : self.end]).view(kept, heads, -1)
        return out if self.places is None else out.index_select(0, self.places)

    def _with_new_token(
        self, caches: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """The layer's keys and values, filled up to `end`."""
        layer = caches[0].data_ptr()
        found = self.kept.get(layer)
        if found is None:
            memory = self._memory.setdefault(layer, [torch.empty(0), torch.empty(0)])
            found = self.kept[layer] = [self._gathered(*pair) for pair in zip(caches, memory, strict=True)]
            return found
        for newest, kept in zip(new or [cache[self.newest] for cache in caches], found, strict=True):
            if self.places is None:
                kept[:, :, self.end - 1] = newest
            else:
                kept[:, :, self.end - 1].index_copy_(0, self.places, newest.to(kept.dtype))
        return found

    def _gathered(self, cache: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        assert self.end == self.slots.shape[1], (self.end, self.slots.shape)
        shape = (len(self.slots), cache.shape[1], self.capacity, cache.shape[2])
        if memory.numel() < math.prod(shape):
            memory.resize_(math.prod(shape))
        kept = memory[: math.prod(shape)].view(shape)
        kept[:, :, : self.end] = take_slots(cache, self.slots).transpose(1, 2)
        return kept
