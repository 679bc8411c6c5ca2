"""One session, two rounds after the prompt's, k <= 2: one fault at every step, every order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.commands import Proposal
from coordinator.foresight import Foresight
from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh.ledger import Ledger
from tests.sim.bugs import resume_from_nothing
from tests.sim.caller import RULES
from tests.sim.explore import explore, small_run
from tests.sim.states import _channels, _told

FAULTS = {"target0", "draft0", "coordinator0", "caller", "deadline target", "deadline draft"}


@pytest.mark.parametrize("place", ["target", "coordinator"])
@pytest.mark.parametrize("k", [1, 2])
def test_one_fault_at_every_step(k: int, place: str) -> None:
    """Whichever process dies, or deadline passes, at whichever step: the output is whole."""
    setup, request = small_run("coupled", k, place)
    found = explore(setup, request, after_fault=False)
    assert found.failures == []
    assert set(found.faults) == {"none", *FAULTS}
    assert found.num_runs > 100


@pytest.mark.parametrize("k", [1, 2])
def test_one_fault_at_every_step_of_rounds_drafted_ahead(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where rounds begin with candidates that were drafted ahead."""
    taken: list[int] = []
    take = Foresight.take

    def counted(self: Foresight, path: Sequence[int], num_draft_tokens: int) -> Proposal | None:
        proposal = take(self, path, num_draft_tokens)
        taken.append(proposal is not None)
        return proposal

    monkeypatch.setattr(Foresight, "take", counted)
    found = explore(*small_run("residual", k, "target", num_ahead=6), after_fault=False)
    assert found.failures == []
    assert set(found.faults) == {"none", *FAULTS}
    assert sum(taken) > 50


def test_small_runs_have_every_kind_of_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is explored accepts all, some and none of the candidates, and goes on after each."""
    settled: set[tuple[int, int]] = set()
    settle = Ledger.settle

    def recorded(self: Ledger, num_accepted: int) -> None:
        settled.add((self.num_pending, num_accepted))
        settle(self, num_accepted)

    monkeypatch.setattr(Ledger, "settle", recorded)
    for rule, k in (("coupled", 1), ("coupled", 2), ("residual", 2), ("residual", 1)):
        found = explore(*small_run(rule, k, "target"), num_faults=0, after_fault=False)
        assert found.failures == []
    assert settled >= {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_every_order_without_faults() -> None:
    """Draft and target answer in any order; no order of replies changes the output."""
    for rule in RULES:
        setup, request = small_run(rule, 2, "target", num_targets=2)
        found = explore(setup, request, num_faults=0)
        assert found.failures == []
        assert found.num_runs >= 2


def test_ending_at_known_states_hides_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that forgets what it holds is found, although most runs end early."""
    resume_from_nothing(monkeypatch)
    found = explore(*small_run("coupled", 2, "target"), after_fault=False)
    assert found.num_met > 0
    assert any("caller" in failure for failure in found.failures)


def test_states_differ_by_content_and_not_by_measured_times() -> None:
    """Two answers that differ in times alone are one; another token, or another way, is another."""

    def answer(token: int, total_us: int) -> bytes:
        result = target_pb2.TargetResult(
            session_id="s",
            verdict=target_pb2.Verdict(tokens=[token]),
            timing=session_pb2.StepTiming(total_us=total_us),
        )
        return target_pb2.TargetServiceLinkResponse(results=[result]).SerializeToString()

    way = ("target0", "coordinator0")
    assert _told((way, answer(1, 5))) == _told((way, answer(1, 6)))
    assert _told((way, answer(1, 5))) != _told((way, answer(2, 5)))
    assert _told((way, answer(1, 5))) != _told((("target1", "coordinator0"), answer(1, 5)))
    assert _told((way[::-1], answer(1, 5))) != _told((way[::-1], answer(1, 6)))


def test_states_keep_the_order_within_a_channel_and_no_other() -> None:
    """Which channel was used first has no future; what stands first in a channel has."""
    first, second, third = (("target0", name) for name in ("one", "two", "three"))
    told = [_channels([[first, second], [third]]), _channels([[third], [first, second]])]
    assert told[0] == told[1]
    assert _channels([[second, first], [third]]) != told[0]
    assert _channels([[first], [second, third]]) != told[0]
