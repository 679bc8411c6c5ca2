"""What a draft has drafted ahead: proposals for the next round, by how this one may end.

While the target verifies a round, its draft has nothing to do. It then drafts on from the likeliest
outcomes, and a round that ends in one of them is followed at once: its candidates need no way to
the draft and back. A proposal drafted ahead is the one that the draft would answer with, from the
same prefix with the same noise, so that taking it bends no law (THEORY section 6).

Pure. Owns which continuation fits, and how far the candidates of a round that took one are those
of the draft's own answer, which comes later: a draft keeps K/V for no others.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.commands import Ahead, Proposal

MAX_VAIN = 4  # proposals in a row whose continuations came too late, or not at all
NUM_RESTS = 64  # proposals for which none is asked for then


class Foresight:
    """Mutable; one per draft's side of a session.

    num_shared: leading candidates of the round judged last that the draft's last answer has too.
    """

    def __init__(self) -> None:
        self._by_path: dict[tuple[int, ...], Proposal] = {}
        self._num_asked = 0  # candidates of each of them, unless cut
        self._taken: tuple[int, ...] | None = None  # until the draft's own answer has come
        self._num_accepted = 0  # of the round that took them
        self.num_shared = 0
        self._is_asked = False  # of the last proposal, and nothing came yet
        self._num_vain = self._num_rests = 0

    def keep(self, drafted: Sequence[int], num_asked: int, ahead: Ahead) -> None:
        """Remember the continuations of the proposal `drafted`, by the tokens that lead to each.
        num_asked: candidates that were asked for, in each as in the proposal."""
        self._is_asked, self._num_vain = False, 0
        self._num_asked = num_asked
        self._by_path = {
            (*drafted[: each.num_accepted], each.closing_token): each.proposal
            for each in ahead.continuations
        }

    def num_worth(self, wanted: int) -> int:
        """How many continuations to ask for with the next proposal, of so many wanted. None for a
        while, where they never come before the round ends: the draft then works in vain."""
        self._num_vain += self._is_asked
        if self._num_vain >= MAX_VAIN:
            self._num_vain, self._num_rests = 0, NUM_RESTS
        is_resting = self._num_rests > 0
        self._num_rests -= is_resting
        self._is_asked = wanted > 0 and not is_resting
        return wanted if self._is_asked else 0

    def forget(self) -> None:
        """What was drafted ahead continues nothing any more."""
        self._by_path = {}

    def take(self, path: Sequence[int], num_draft_tokens: int) -> Proposal | None:
        """The first num_draft_tokens candidates behind `path`, the tokens since the proposal's
        prefix; None where they were not drafted. A continuation that ends before counts as them,
        for it is what the draft would answer; whether it does must have no say here, as it follows
        from the candidates. The draft's own answer is awaited from here on."""
        found = self._by_path.get(tuple(path))
        if found is None or not 0 < num_draft_tokens <= self._num_asked:
            return None
        count = min(num_draft_tokens, len(found.tokens))
        self._taken, self._num_accepted = found.tokens[:count], 0
        return Proposal(
            self._taken,
            found.rows[:count],
            found.dropped_mass[:count],
            is_cut=found.is_cut and count < num_draft_tokens,
        )

    def judged(self, num_accepted: int) -> int | None:
        """How many candidates were kept of the last round that had some: how many of the draft's
        last answer that are. None while that answer is still to come."""
        if self._taken is not None:
            self._num_accepted = num_accepted
            return None
        return min(num_accepted, self.num_shared)

    def answered(self, tokens: Sequence[int]) -> int:
        """The draft's own answer: how many of its candidates are known to be kept."""
        if self._taken is None:
            self.num_shared = len(tokens)
            return 0
        pairs = zip(self._taken, tokens, strict=False)
        self.num_shared = next(
            (index for index, (taken, own) in enumerate(pairs) if taken != own),
            min(len(self._taken), len(tokens)),
        )
        self._taken = None
        return min(self._num_accepted, self.num_shared)

    def unanswered(self) -> None:
        """The draft gives no answer for what a round has taken: it keeps K/V for none of it."""
        self._taken, self.num_shared, self._is_asked = None, 0, False
