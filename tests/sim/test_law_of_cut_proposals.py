"""The residual rule keeps the target's law where rows of the draft cannot be used.

Whether a row between candidates can be used depends on the candidates before it: a proposal may end
there, and must neither fail there nor come at another time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from coordinator.commands import Proposal
from coordinator.foresight import Foresight
from draft_service import proposer
from draft_service.proposer import Proposer
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2
from specmesh.engine.runner import Engine
from tests.sim.model import DeviceFailure, TinyModel
from tests.sim.options import Setup
from tests.sim.test_law_under_faults import crashes_of, law_is_kept, tiny
from tests.sim.world import Crash

Prefixes = Sequence[tuple[int, ...]]
PROMPT = (0, 1)
# The target's first token, then one candidate or two: no law behind them.
AFTER_ONE: Prefixes = [(*PROMPT, first, 0) for first in range(2)]
AFTER_TWO: Prefixes = [(*prefix, 1) for prefix in AFTER_ONE]
BEFORE_ANY: Prefixes = [(*PROMPT, 0)]
# Three tokens behind the prompt that end so, of whatever round.
AFTER_THREE: Prefixes = [(*PROMPT, *two, 0) for two in itertools.product(range(2), repeat=2)]
BETWEEN_PASSES_S = 0.0075  # the first proposal's second pass is over, its third is not
ASKED_AGAIN_S = 0.0105  # the first proposal has come, its round is not over
WITH_CONTINUATIONS_S = 0.0125  # those of the first are there


def failing(nan_after: Prefixes, k: int, **changes: Any) -> tuple[Setup, pb.GenerateRequest]:
    """A draft whose rows behind these prefixes hold no law; its first round has k candidates."""
    place = changes.pop("place", session_pb2.DECIDE_AT_TARGET)
    setup, request = tiny(max_tokens=k + 2, k=k, place=place)
    return replace(setup, nan_after=tuple(nan_after), **changes), request


@pytest.mark.parametrize("place", [session_pb2.DECIDE_AT_TARGET, session_pb2.DECIDE_AT_COORDINATOR])
@pytest.mark.parametrize(
    ("nan_after", "k"),
    [(BEFORE_ANY, 2), (AFTER_ONE, 2), (AFTER_TWO, 3), (AFTER_THREE, 2)],
    ids=["first", "second", "third", "any"],
)
def test_law_where_a_row_holds_no_law(nan_after: Prefixes, k: int, place: int) -> None:
    """NaN in first rows, behind one certain candidate, behind two, and wherever a prefix is met."""
    assert law_is_kept(*failing(nan_after, k, place=place), [])


@pytest.mark.parametrize("kinds", [("draft",), ("coordinator",)], ids="+".join)
def test_law_of_cut_proposals_under_a_crash(kinds: tuple[str, ...]) -> None:
    """A draft or a coordinator dies when a cut proposal might have come and a whole one not yet."""
    setup, request = failing(AFTER_ONE, 3)
    assert law_is_kept(setup, request, crashes_of(kinds, BETWEEN_PASSES_S))


@pytest.mark.parametrize("at_s", [None, WITH_CONTINUATIONS_S])
def test_law_of_cut_continuations(at_s: float | None) -> None:
    """NaN behind candidates that were drafted ahead, and behind a block's last; also where the
    draft is lost when rounds have them already."""
    setup, request = failing(AFTER_THREE, 2, num_ahead=2)
    request.max_tokens = 5
    assert law_is_kept(setup, request, [] if at_s is None else crashes_of(("draft",), at_s))


def asked_again() -> tuple[Setup, pb.GenerateRequest, list[Crash]]:
    """A caller is lost and resumes, with the same noise at the same base; then the draft is."""
    setup, request = failing(AFTER_ONE, 2, page_size=1, token_budget=1, prefill_chunk=1)
    request.max_tokens = 4
    crashes = [Crash(ASKED_AGAIN_S, "caller", 0.05), Crash(ASKED_AGAIN_S + 0.005, "draft", 2.0)]
    return replace(setup, draft_prefill="after_first_token"), request, crashes


def test_law_where_a_cut_base_is_asked_for_again() -> None:
    """What is confirmed stays in the prefix cache behind a cut proposal as behind a whole one: else
    the same candidates come later the next time, by what follows them."""
    assert law_is_kept(*asked_again())


def test_a_prefix_that_a_cut_proposal_takes_along_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the command wrote is dropped, what was confirmed before it as well."""
    monkeypatch.setattr(
        Engine, "_keep_confirmed", lambda self, task: self._scheduler.wipe(task.session)
    )
    assert not law_is_kept(*asked_again())


def test_law_where_a_pass_fails_behind_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that fails on what it is fed: what was drawn before it is proposed."""
    logits = TinyModel._logits

    def fail(self: TinyModel, digest: int) -> Tensor:
        if digest in self._nan_digests:
            raise DeviceFailure("the device fails on this token")
        return logits(self, digest)

    monkeypatch.setattr(TinyModel, "_logits", fail)
    assert law_is_kept(*failing(AFTER_ONE, 2), [])


# ---------------------------------------------------------------- what is wrong is found


def test_a_proposal_that_fails_by_its_candidates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """To fail behind a certain candidate leaves out that candidate."""

    def fail(_task: Any, fault: Exception) -> None:
        raise fault

    monkeypatch.setattr(proposer, "cut", fail)
    monkeypatch.setattr(Proposer, "salvage", lambda self, task: None)
    assert not law_is_kept(*failing(AFTER_ONE, 2), [])


def test_a_cut_proposal_that_comes_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent when it is known, it is there when a draft dies that still draws the others."""
    advance = Proposer._advance

    def hasty(self: Proposer, entry: Any, logits: Tensor) -> Any:
        outcome = advance(self, entry, logits)
        if outcome is None and entry.task.fault is not None:
            entry.task.fed.pop()
            return self._proposal(entry.task.role_state)
        return outcome

    monkeypatch.setattr(Proposer, "_advance", hasty)
    setup, request = failing(AFTER_ONE, 3)
    assert not law_is_kept(setup, request, crashes_of(("draft",), BETWEEN_PASSES_S))


def test_cut_continuations_that_are_not_taken_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for once more they are the same: unless the draft is lost meanwhile."""
    take = Foresight.take

    def picky(self: Foresight, path: Sequence[int], num_draft_tokens: int) -> Proposal | None:
        kept = dict(self._by_path)
        found = take(self, path, num_draft_tokens)
        if found is not None and found.is_cut:
            self._by_path, self._taken = kept, None
            return None
        return found

    monkeypatch.setattr(Foresight, "take", picky)
    setup, request = failing(AFTER_THREE, 2, num_ahead=2)
    request.max_tokens = 5
    assert not law_is_kept(setup, request, crashes_of(("draft",), WITH_CONTINUATIONS_S))
