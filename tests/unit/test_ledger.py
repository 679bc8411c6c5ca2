"""The ledger: boundaries after every round, digests, resync, preemption, and failed updates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specmesh.errors import ContextTooLong, InvalidRequest, PrefixMismatch, StaleRound
from specmesh.ledger import EMPTY_DIGEST, Boundaries, Ledger, extend_digest

PROMPT = [3, 1, 4, 1, 5]


def ledger(tokens: list[int] | None = None, max_len: int = 200) -> Ledger:
    """A ledger with a confirmed prefix, all of it but the last token in K/V, as between rounds."""
    tokens = PROMPT if tokens is None else tokens
    made = Ledger(prompt_len=len(tokens), max_len=max_len)
    made.extend(tokens)
    made.allocated_len = max_len
    made.wrote(len(tokens) - 1)
    return made


def update(target: Ledger, append: list[int], **changes: Any) -> dict[str, Any]:
    """Arguments of an update that appends to `target`, with some replaced."""
    tokens = [*target.tokens, *append]
    arguments: dict[str, Any] = {
        "base_len": len(tokens),
        "append_from": target.confirmed_len,
        "append": append,
        "num_accepted": 0,
        "digest": extend_digest(EMPTY_DIGEST, tokens),
        "resync": False,
    }
    return arguments | changes


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_target_boundaries_after_a_round(k: int) -> None:
    """Written up to c+k; afterwards confirmed = c+j+1 and kv_len = confirmed - 1 for every j."""
    for accepted in range(k + 1):
        target = ledger()
        c = target.confirmed_len
        target.begin_round(k)
        target.wrote(c + k)
        assert target.written_len == c + k
        assert target.kv_len == c
        target.settle(accepted)
        target.extend([7] * (accepted + 1))
        target.check()
        assert target.confirmed_len == c + accepted + 1
        assert target.kv_len == target.confirmed_len - 1 == c + accepted
        assert target.written_len == target.kv_len


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_draft_boundaries_after_a_round(k: int) -> None:
    """Written up to c+k-1: one token to feed after a rejection, two after full acceptance."""
    for accepted in range(k + 1):
        draft = ledger()
        c = draft.confirmed_len
        draft.begin_round(k)
        draft.wrote(c + k - 1)
        append = [7] * (accepted + 1)
        draft.apply_update(**update(draft, append, num_accepted=accepted))
        draft.check()
        assert draft.confirmed_len == c + accepted + 1
        assert draft.kv_len == min(c + accepted, c + k - 1)
        to_feed = draft.confirmed_len - draft.kv_len
        assert to_feed == (2 if accepted == k else 1)


def test_a_recovered_token_equal_to_the_rejected_candidate_keeps_no_kv() -> None:
    """The boundary comes from num_accepted, never from comparing tokens."""
    draft = ledger()
    draft.begin_round(2)
    draft.wrote(draft.confirmed_len + 1)
    draft.apply_update(**update(draft, [9], num_accepted=0))
    assert draft.kv_len == draft.confirmed_len - 1


def test_k_three_zero_three() -> None:
    """Rounds with and without candidates in turn keep the boundaries on both sides."""
    target, draft = ledger(), ledger()
    for k, accepted in ((3, 3), (0, 0), (3, 1), (0, 0), (3, 0)):
        c = target.confirmed_len
        target.begin_round(k)
        target.wrote(c + k)
        target.settle(accepted)
        target.extend([2] * (accepted + 1))
        if k:
            draft.begin_round(k)
            draft.wrote(draft.confirmed_len + k - 1)
        draft.apply_update(**update(draft, [2] * (accepted + 1), num_accepted=accepted))
        target.check()
        draft.check()
        assert target.digest() == draft.digest()
        assert target.kv_len == target.confirmed_len - 1


def test_digest_names_the_whole_prefix() -> None:
    """Order, values and length all matter; extending is the same as digesting at once."""
    whole = extend_digest(EMPTY_DIGEST, [1, 2, 3])
    assert extend_digest(extend_digest(EMPTY_DIGEST, [1]), [2, 3]) == whole
    others = ([1, 3, 2], [1, 2], [1, 2, 3, 0], [0, 1, 2, 3], [], [0])
    digests = {extend_digest(EMPTY_DIGEST, tokens) for tokens in others}
    assert len(digests) == len(others)
    assert whole not in digests
    assert 0 <= whole < 1 << 64
    made = ledger([1, 2, 3])
    assert made.digest() == whole
    assert made.digest(1) == extend_digest(EMPTY_DIGEST, [1])


def test_digest_known_answers() -> None:
    """Fixed values: both ends of a link, of any version, must agree on them."""
    assert extend_digest(EMPTY_DIGEST, []) == 0x9E3779B97F4A7C15
    assert extend_digest(EMPTY_DIGEST, [0]) == 0x6E789E6AA1B965F4
    assert extend_digest(EMPTY_DIGEST, [1, 2, 3]) == 0x422B7C52DE20EA55


def test_page_digests_cover_full_pages_and_the_end() -> None:
    """Every page boundary, then the end; nothing for an empty prefix."""
    made = ledger(list(range(10)))
    assert [end for end, _ in made.page_digests(4)] == [4, 8, 10]
    assert [end for end, _ in made.page_digests(5)] == [5, 10]
    assert [end for end, _ in made.page_digests(64)] == [10]
    assert all(digest == made.digest(end) for end, digest in made.page_digests(4))
    assert Ledger(prompt_len=1, max_len=4).page_digests(4) == ()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base_len": 6}, InvalidRequest),
        ({"num_accepted": 4}, InvalidRequest),
        ({"append_from": 6, "base_len": 8}, PrefixMismatch),
        ({"append_from": 4, "base_len": 6}, PrefixMismatch),
        ({"digest": 1}, PrefixMismatch),
        ({"append": [8, 9] * 100, "base_len": 205}, ContextTooLong),
        ({"num_accepted": 3}, InvalidRequest),
        ({"num_accepted": 3, "resync": True}, InvalidRequest),
    ],
)
def test_a_failed_update_changes_nothing(changes: dict[str, Any], error: type[Exception]) -> None:
    """Every contradiction is refused by its own error before anything moves."""
    made = ledger()
    made.begin_round(3)
    made.wrote(7)
    before = copy.deepcopy(made)
    arguments = update(made, [8, 9]) | changes
    with pytest.raises(error):
        made.check_update(**arguments)
    with pytest.raises(error):
        made.apply_update(**arguments)
    assert made == before


def test_a_mismatch_tells_where_the_ledger_stands() -> None:
    """PrefixMismatch carries the confirmed length that a resync starts from."""
    made = ledger()
    with pytest.raises(PrefixMismatch) as caught:
        made.apply_update(**update(made, [8], digest=5))
    assert caught.value.confirmed_len == 5


def test_resync_truncates_then_appends() -> None:
    """With resync the confirmed prefix is cut to append_from; K/V past it is no longer valid."""
    made = ledger(list(range(20)))
    made.begin_round(2)
    made.wrote(21)
    tokens = [*range(8), 50, 51]
    made.apply_update(
        base_len=10, append_from=8, append=[50, 51], num_accepted=0,
        digest=extend_digest(EMPTY_DIGEST, tokens), resync=True,
    )  # fmt: skip
    assert made.tokens == tokens
    assert (made.kv_len, made.written_len, made.num_pending) == (8, 8, 0)
    made.check()


def test_skipped_rounds_drop_an_unjudged_proposal() -> None:
    """A proposal that nobody judged settles with 0 accepted, whatever was confirmed since."""
    draft = ledger()
    c = draft.confirmed_len
    draft.begin_round(3)
    draft.wrote(c + 2)
    draft.apply_update(**update(draft, [6, 7, 8], num_accepted=0))
    assert draft.kv_len == c
    draft.check()


def test_preemption_between_rounds_keeps_what_is_pending() -> None:
    """The outcome of a proposal may arrive after its K/V was dropped: nothing is valid then."""
    draft = ledger()
    draft.begin_round(3)
    draft.wrote(draft.confirmed_len + 2)
    draft.drop_kv()
    assert draft.boundaries == Boundaries(5, 0, 0)
    draft.apply_update(**update(draft, [7, 7], num_accepted=1))
    assert (draft.confirmed_len, draft.kv_len, draft.num_pending) == (7, 0, 0)
    draft.check()


def test_preemption_within_a_round_lets_it_begin_again() -> None:
    """A round in flight that lost its K/V is opened again; one that did not is a bug."""
    made = ledger()
    made.begin_round(2)
    with pytest.raises(AssertionError):
        made.begin_round(2)
    made.drop_kv()
    made.begin_round(2)
    made.allocated_len = 64
    made.wrote(made.confirmed_len + 2)
    made.settle(2)
    made.extend([1, 1, 1])
    made.check()
    assert made.kv_len == made.confirmed_len - 1


def test_wrote_more_than_reserved_or_fed_is_a_bug() -> None:
    """K/V past the pages, or past the candidates, cannot have been written."""
    made = ledger()
    with pytest.raises(AssertionError):
        made.wrote(6)
    made.begin_round(4)
    made.allocated_len = 7
    with pytest.raises(AssertionError):
        made.wrote(8)


def test_the_session_never_passes_max_len() -> None:
    """Extending past max_len is refused and changes nothing."""
    made = ledger(max_len=6)
    made.extend([1])
    with pytest.raises(ContextTooLong):
        made.extend([2])
    assert made.tokens == [*PROMPT, 1]


def test_epochs_only_grow() -> None:
    """An epoch that is not newer is stale."""
    made = ledger()
    made.advance_epoch(3)
    for epoch in (3, 2):
        with pytest.raises(StaleRound):
            made.advance_epoch(epoch)
    assert made.epoch == 3


class BothSides(RuleBasedStateMachine):
    """Random rounds, fallbacks, preemptions and resyncs of a target and a draft ledger."""

    @initialize(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9))
    def open(self, prompt: list[int]) -> None:
        """Both sides hold the prompt; the target's last prompt token gave the first output."""
        self.truth = [*prompt, 0]
        self.target = Ledger(prompt_len=len(prompt), max_len=10_000)
        self.draft = Ledger(prompt_len=len(prompt), max_len=10_000)
        self.proposed: int | None = None
        self.accepted_of_proposal = 0
        self._feed(self.target, 0)
        self.target.extend(self.truth)
        self._feed(self.target, len(prompt))

    def _feed(self, side: Ledger, length: int) -> None:
        side.allocated_len = max(side.allocated_len, length)
        side.wrote(length)

    def _bring(self, side: Ledger, num_accepted: int) -> None:
        """Append what the side lacks, as a command's prefix does."""
        append = self.truth[side.confirmed_len :]
        side.apply_update(**update(side, append, num_accepted=num_accepted))

    @rule(k=st.integers(1, 4), data=st.data(), token=st.integers(0, 9))
    def speculate(self, k: int, data: st.DataObject, token: int) -> None:
        """A round with candidates on both sides."""
        self._bring(self.draft, self.accepted_of_proposal)
        c = len(self.truth)
        self.draft.begin_round(k)
        self._feed(self.draft, c + k - 1)
        self.target.begin_round(k)
        self._feed(self.target, c + k)
        accepted = data.draw(st.integers(0, k))
        emitted = [token] * (accepted + 1)
        self.target.settle(accepted)
        self.target.extend(emitted)
        self.truth += emitted
        self.accepted_of_proposal = accepted
        assert self.target.kv_len == self.target.confirmed_len - 1
        assert self.draft.written_len == c + k - 1

    @rule(num_tokens=st.integers(1, 3), token=st.integers(0, 9))
    def plain(self, num_tokens: int, token: int) -> None:
        """The target decodes alone; the draft falls behind."""
        for _ in range(num_tokens):
            self._feed(self.target, self.target.confirmed_len)
            self.target.settle(0)
            self.target.extend([token])
            self.truth.append(token)

    @rule(k=st.integers(1, 4))
    def discarded(self, k: int) -> None:
        """A proposal that arrives too late and is never judged."""
        self._bring(self.draft, self.accepted_of_proposal)
        self.draft.begin_round(k)
        self._feed(self.draft, self.draft.confirmed_len + k - 1)
        self.accepted_of_proposal = 0

    @rule(side=st.sampled_from(["target", "draft"]))
    def preempt(self, side: str) -> None:
        """K/V is dropped; a target rebuilds it before it decides again."""
        getattr(self, side).drop_kv()
        if side == "target":
            self._feed(self.target, self.target.confirmed_len - 1)

    @precondition(lambda self: len(self.truth) > 3)
    @rule(data=st.data())
    def resync_draft(self, data: st.DataObject) -> None:
        """The draft is cut back to an earlier length and brought forward again."""
        start = data.draw(st.integers(0, self.draft.confirmed_len))
        self.draft.apply_update(
            base_len=len(self.truth),
            append_from=start,
            append=self.truth[start:],
            num_accepted=0,
            digest=extend_digest(EMPTY_DIGEST, self.truth),
            resync=True,
        )
        self.accepted_of_proposal = 0

    @invariant()
    def boundaries_hold(self) -> None:
        """Between rounds: lengths ordered, the target one behind, prefixes equal where both are."""
        if not hasattr(self, "truth"):
            return
        self.target.check()
        self.draft.check()
        assert self.target.tokens == self.truth
        assert self.target.kv_len == self.target.confirmed_len - 1
        shared = self.draft.confirmed_len
        assert self.draft.tokens == self.truth[:shared]
        assert self.draft.digest() == self.target.digest(shared)


BothSides.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBothSides = BothSides.TestCase
