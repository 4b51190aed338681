"""A session's token tree: what the requests of an agent have in common, as messages and as token ids.

Guarantees, each asserted by a test:

- what the policy generated is never tokenised again: the prompt of a request that continues a turn is the ids that the engine was given
  and gave up to that turn, and the ids of the new messages alone;
- a request continues the turn that accounts for most of its messages, compared one by one; among equals, the latest. A request that
  shares nothing with earlier ones, or has other tools, begins a root of its own;
- a root belongs to one player (None where there are none), and a request continues turns of its own player alone: equal messages of two players
  are two roots. Trajectories come player by player, each with its player;
- every path from a root to a leaf is a trajectory; the prompt and response of each of its turns are, token by token, what the engine was
  given and gave;
- every generated token is live in exactly one trajectory: a turn that several paths share is trained on in that of them that ends with the
  latest turn, and masked in the others. Tokens of masked turns, and of messages that the policy did not write, have log-prob 0;
- a response ends with a token that the policy chose in this very path.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megarl.data.kept import KeptTokens, kept_of
from megarl.data.sessions import trajectory_uid
from megarl.data.trajectories import Generation
from megarl.gateway.messages import Message, are_same, is_turn


class Render(Protocol):
    """Messages as token ids, by the chat template; each ends with the opening of the assistant's turn and the text `forced`.

    Raises ValueError if the template refuses the messages.
    """

    def begin(self, messages: Sequence[Message], keywords: Mapping[str, Any], forced: str) -> list[int]:
        """A whole conversation."""

    def go_on(
        self, turn: "PolicyTurn", messages: Sequence[Message], keywords: Mapping[str, Any], forced: str
    ) -> list[int]:
        """The ids that follow a turn of the policy."""


@dataclass(eq=False)
class Prompt:
    """The messages and ids that the policy is given before a turn, beyond the path up to it.

    Attributes:
        parent: the turn that it continues; None: it is a root.
        keywords: of the chat template, such as `tools`; the same in all of a root's tree.
        forced: a text with which the policy's turn must begin (the head of a call); its ids are the last ones of `ids`.
        ids: [tokens] beyond the parent's path.
        player: whose request it is, of several that the policy plays; None: there are none.
        turns: the policy's turns, in the order in which they ended: several for n > 1 and for retries.
    """

    parent: "PolicyTurn | None"
    messages: tuple[Message, ...]
    keywords: Mapping[str, Any]
    forced: str
    ids: tuple[int, ...]
    player: str | None = None
    turns: "list[PolicyTurn]" = field(default_factory=list)

    def path(self) -> "Iterator[PolicyTurn]":
        """The turns before it, the last one first."""
        turn = self.parent
        while turn is not None:
            yield turn
            turn = turn.prompt.parent

    def all_ids(self) -> list[int]:
        """All ids that the engine is given: the path's and its own."""
        parts = [self.ids]
        for turn in self.path():
            parts += [tuple(turn.generation.response_ids), turn.prompt.ids]
        return [token for part in reversed(parts) for token in part]

    def experts_from(self) -> int:
        """The first token whose experts are not known: the path's last one never passed through the model."""
        if self.parent is None:
            return 0
        return len(self.parent.prompt.all_ids()) + len(self.parent.generation.response_ids) - 1


@dataclass(eq=False)
class PolicyTurn:
    """A turn of the policy.

    Attributes:
        message: as the client was given it.
        generation: as the engine gave it; its experts are those of the tokens from `prompt.experts_from()` on.
        ended: whether its last token is an end token of the model.
        number: its place among the session's turns, in the order in which they ended.
    """

    prompt: Prompt
    message: Message
    generation: Generation
    ended: bool
    number: int
    prompts: list[Prompt] = field(default_factory=list)


class SessionTree:
    """The tree, without any input or output; used by one event loop."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._roots: list[Prompt] = []
        self._turns: list[PolicyTurn] = []

    @property
    def turns(self) -> Sequence[PolicyTurn]:
        """The turns, in the order in which they ended."""
        return self._turns

    @property
    def players(self) -> list[str | None]:
        """The players that have turns, in the order of their first turns."""
        return list(dict.fromkeys(turn.prompt.player for turn in self._turns))

    def prompt(
        self,
        messages: Sequence[Message],
        keywords: Mapping[str, Any],
        forced: str = "",
        player: str | None = None,
    ) -> Prompt:
        """The prompt of a request: one that it repeats, or a new one where it belongs.

        Args:
            messages: the whole conversation; the last one is not the assistant's.
            player: whose request it is.

        Raises:
            ValueError: the chat template refuses the messages.
        """
        assert messages and messages[-1]["role"] != "assistant", "the APIs refuse these"
        roots = [root for root in self._roots if root.player == player and root.keywords == keywords]
        turn, used = _continued(roots, messages)
        rest = tuple(messages[used:])
        siblings = roots if turn is None else turn.prompts
        for prompt in siblings:
            if are_same(rest, prompt.messages) and prompt.forced == forced:
                return prompt
        if turn is None:
            ids = self._render.begin(rest, keywords, forced)
        else:
            ids = self._render.go_on(turn, rest, keywords, forced)
        made = Prompt(turn, rest, keywords, forced, tuple(ids), player)
        (self._roots if turn is None else turn.prompts).append(made)
        return made

    def add(self, prompt: Prompt, generation: Generation, message: Message, ended: bool) -> PolicyTurn:
        """Add an answer that the client was given."""
        assert len(generation.response_ids) > 0, generation.uid
        turn = PolicyTurn(prompt, message, generation, ended, len(self._turns))
        prompt.turns.append(turn)
        self._turns.append(turn)
        return turn

    def trajectories(self, uid: str) -> list[Generation]:
        """One trajectory for each leaf, in the order in which the leaves ended, player by player; with uids by `trajectory_uid` and
        prompts of their own."""
        leaves = [turn for turn in self._turns if not any(prompt.turns for prompt in turn.prompts)]
        leaves.sort(key=lambda leaf: leaf.prompt.player or "")
        live_in: dict[int, PolicyTurn] = {}
        for leaf in reversed(leaves):
            for turn in _path(leaf):
                live_in.setdefault(id(turn), leaf)
        return [
            _trajectory(uid, number, leaf, [turn for turn in _path(leaf) if live_in[id(turn)] is leaf])
            for number, leaf in enumerate(leaves)
        ]


def _path(leaf: PolicyTurn) -> list[PolicyTurn]:
    """The turns from the root to a leaf."""
    return [*reversed([leaf, *leaf.prompt.path()])]


def _continued(roots: Sequence[Prompt], messages: Sequence[Message]) -> tuple[PolicyTurn | None, int]:
    """The turn that the messages continue, and how many messages it accounts for; (None, 0): there is no such turn."""
    best: tuple[int, int, PolicyTurn | None] = (0, -1, None)
    level: list[tuple[Sequence[Prompt], int]] = [(roots, 0)]
    while level:
        following: list[tuple[Sequence[Prompt], int]] = []
        for prompts, used in level:
            for prompt in prompts:
                end = used + len(prompt.messages)
                if len(messages) - 1 <= end or not are_same(messages[used:end], prompt.messages):
                    continue
                for turn in prompt.turns:
                    if is_turn(messages[end], turn.message):
                        following.append((turn.prompts, end + 1))
                        best = max(best, (end + 1, turn.number, turn), key=lambda found: found[:2])
        level = following
    return best[2], best[0]


def _trajectory(uid: str, number: int, leaf: PolicyTurn, live: Sequence[PolicyTurn]) -> Generation:
    path, player = _path(leaf), leaf.prompt.player
    ids: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    kept: list[KeptTokens] = []
    for turn in path:
        given = () if turn is path[0] else turn.prompt.ids
        said = turn.generation.response_ids
        chosen = turn in live
        ids += [*given, *said]
        mask += [False] * len(given) + [chosen] * len(said)
        log_probs += [0.0] * len(given) + ([*turn.generation.log_probs] if chosen else [0.0] * len(said))
        kept += [kept_of(None, len(given)), kept_of(turn.generation.kept if chosen else None, len(said))]
    first, last = path[0].generation, leaf.generation
    experts, drawn_from = [turn.generation.routed_experts for turn in path], KeptTokens.joined(kept)
    return Generation(
        trajectory_uid(uid, number, player),
        ids,
        log_probs,
        last.finish_reason,
        first.weight_version,
        response_mask=mask,
        num_turns=len(path),
        prompt_ids=list(path[0].prompt.ids),
        last_weight_version=last.weight_version
        if last.last_weight_version is None
        else last.last_weight_version,
        routed_experts=None if any(part is None for part in experts) else np.concatenate(experts),  # type: ignore[arg-type]
        kept=drawn_from if len(drawn_from.ids) else None,
        player=player,
    )
