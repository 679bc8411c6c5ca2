"""The undo of a command and the session table, without engine or transport."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernels.streams import philox
from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh.engine.sessions import Checkpoint, Limits, SessionTable
from specmesh.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelMismatch,
    OutOfPages,
    SessionNotFound,
    StaleRound,
    TooBusy,
)
from specmesh.ledger import Ledger

LIMITS = Limits(
    vocab_size=16, vocab_hash=9, max_context_len=100, max_sessions=2, total_pages=16, page_size=4
)


def snapshot(ledger: Ledger):
    return (list(ledger.tokens), ledger.kv_len, ledger.num_pending, ledger.digest())


@pytest.mark.parametrize("case", range(60))
def test_undo_leads_back_to_where_a_command_began(case) -> None:
    """Whatever update, writes and commits a command did, restore gives tokens, K/V and pending."""
    words = iter(philox(case, (index // 4, 0, 0, 5))[index % 4] for index in range(64))

    def below(bound: int) -> int:
        return next(words) % bound

    ledger = Ledger(prompt_len=2, max_len=100, allocated_len=96)
    ledger.extend([below(16) for _ in range(2 + below(8))])
    ledger.wrote(below(ledger.confirmed_len + 1))
    pending = below(4)
    if pending:
        ledger.wrote(ledger.confirmed_len)
        ledger.begin_round(pending)
        ledger.wrote(ledger.confirmed_len + below(pending + 1))
    before, written_len = snapshot(ledger), ledger.written_len
    resync = bool(below(2))
    append_from = below(ledger.confirmed_len + 1) if resync else ledger.confirmed_len
    checkpoint = Checkpoint.take(ledger, append_from)
    if append_from < ledger.confirmed_len:
        ledger.truncate(append_from)
    else:
        ledger.settle(below(pending + 1))
    ledger.extend([below(16) for _ in range(below(5))])
    first_fed = ledger.written_len
    k = below(4)
    if k:
        ledger.begin_round(k)
    if below(2):
        ledger.wrote(ledger.confirmed_len + k)
    if below(2):
        ledger.settle(below(k + 1))
        ledger.extend([3])
    checkpoint.restore(ledger, first_fed)
    ledger.check()
    tokens, kv_len, num_pending, digest = snapshot(ledger)
    assert (tokens, num_pending, digest) == (before[0], before[2], before[3])
    # What was written before and not overwritten, or more of the tokens that stayed throughout.
    assert ledger.written_len >= min(written_len, first_fed)
    if ledger.written_len > min(written_len, first_fed):
        assert ledger.written_len <= checkpoint.kept_len
    assert kv_len == min(ledger.written_len, ledger.confirmed_len)
    assert kv_len >= min(before[1], first_fed)


def test_undo_after_preemption_claims_no_kv() -> None:
    """A command that lost its pages and then failed leaves tokens, and nothing written."""
    ledger = Ledger(prompt_len=2, max_len=50, allocated_len=8)
    ledger.extend([1, 2, 3])
    ledger.wrote(3)
    ledger.begin_round(2)
    checkpoint = Checkpoint.take(ledger, 3)
    ledger.settle(1)
    ledger.extend([4])
    ledger.drop_kv()
    checkpoint.restore(ledger, 3)
    ledger.check()
    assert (ledger.tokens, ledger.kv_len, ledger.num_pending) == ([1, 2, 3], 0, 2)


def opening(**changes):
    fields = {
        "sampling": session_pb2.SamplingParams(temperature=1.0, top_p=1.0, repetition_penalty=1.0),
        "rule": session_pb2.DECISION_RULE_RESIDUAL,
        "prompt_len": 3,
        "max_len": 20,
        "vocab_hash": 9,
        **changes,
    }
    return target_pb2.TargetCommand(session_id="s", epoch=1, open=session_pb2.OpenSession(**fields))


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"vocab_hash": 8}, ModelMismatch, "vocab_hash"),
        ({"rule": 0}, InvalidRequest, "rule"),
        ({"row_policy": 77}, InvalidRequest, "row_policy"),
        ({"prompt_len": 0}, InvalidRequest, "prompt_len"),
        ({"prompt_len": 21}, InvalidRequest, "prompt_len"),
        ({"max_len": 101}, ContextTooLong, "max_len"),
        ({"max_len": 65}, OutOfPages, "max_len"),
    ],
)
def test_an_open_that_cannot_work_is_refused_before_any_state(changes, error, field) -> None:
    """Each refusal names its field and leaves the table empty."""
    table = SessionTable(LIMITS, lambda: 0)
    with pytest.raises(error) as caught:
        table.check_open(SimpleNamespace(group="g"), opening(**changes))
    assert caught.value.field == field
    assert len(table) == 0


def test_a_full_table_takes_a_replacement_but_no_newcomer() -> None:
    """max_sessions bounds sessions; a higher epoch of one of them is not one more."""
    link = SimpleNamespace(group="g")
    table = SessionTable(LIMITS, lambda: 0)
    commands = [opening(), opening()]
    for index, command in enumerate(commands):
        command.session_id = f"s{index}"
        table.add(link, command, table.check_open(link, command))
    newcomer = opening()
    with pytest.raises(TooBusy):
        table.check_open(link, newcomer)
    newcomer.session_id, newcomer.epoch = "s1", 2
    assert not table.is_repeated_open(link, newcomer)
    table.check_open(link, newcomer)


def test_groups_keep_sessions_of_equal_names_apart() -> None:
    """Two coordinators may use one session id; epochs are checked within a group."""
    now = [5]
    ours, theirs = SimpleNamespace(group="a"), SimpleNamespace(group="b")
    table = SessionTable(LIMITS, lambda: now[0])
    command = opening()
    table.add(ours, command, table.check_open(ours, command))
    with pytest.raises(SessionNotFound):
        table.find(theirs, "s", 1)
    with pytest.raises(StaleRound):
        table.find(ours, "s", 0)
    with pytest.raises(SessionNotFound):
        table.find(ours, "s", 2)
    now[0] = 50
    assert table.expired(44) == [table.get(ours, "s")]
    assert table.find(ours, "s", 1).last_used_ns == 50
    assert table.expired(44) == []
    assert table.of_link(theirs) == []
