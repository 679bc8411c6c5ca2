"""The policy: expected tokens per second decide, k = 0 included, values of tokens never."""

from __future__ import annotations

import inspect
from dataclasses import replace
from fractions import Fraction

import pytest

from coordinator import acceptance, policy, trials
from coordinator import costs as costs_module
from coordinator.acceptance import SharedAcceptance
from coordinator.costs import Costs, Line, RoundSample
from coordinator.policy import (
    FIRST_PLAIN_ROUNDS,
    FIRST_TRIES,
    LONGER_ROUNDS,
    RETRY_ROUNDS,
    SessionPolicy,
    SharedPolicy,
)
from coordinator.trials import LAPSE_ROUNDS
from specmesh.planning import expected_tokens


def sample(
    k: int,
    num_accepted: int,
    *,
    draft: float = 1.0,
    verify: float = 10.0,
    manage: float = 1.0,
    batch_size: int = 1,
    num_tokens: int | None = None,
) -> RoundSample:
    """A round: `draft` per candidate, `verify` whole, all in the same unit."""
    num_judged = min(k, num_accepted + 1)
    tokens = num_accepted + 1 if num_tokens is None else num_tokens
    target = verify if k else verify * tokens
    return RoundSample(k, tokens, num_judged, num_accepted, draft * k, target, manage, batch_size)


def settled(
    rates: list[float],
    *,
    draft: float,
    verify: float,
    plain: float,
    rounds: int = 400,
    manage: float = 1.0,
) -> SessionPolicy:
    """A policy that has seen many rounds of k = len(rates) at these rates, and plain ones."""
    shared = SharedPolicy()
    own = SessionPolicy(shared)
    survivors = Fraction(1)
    thresholds = []
    for rate in rates:
        survivors *= Fraction(rate).limit_denominator(1000)
        thresholds.append(survivors)
    for index in range(rounds):
        place = Fraction((index * 7919) % 997, 997)  # evenly spread, the same every time
        accepted = sum(place < threshold for threshold in thresholds)
        own.observe(sample(len(rates), accepted, draft=draft, verify=verify, manage=manage))
        if index % 4 == 0:
            own.observe(sample(0, 0, verify=plain, manage=0.0))
    return own


def test_theory_s_numbers() -> None:
    """Rates (.9, .7, .5) give 2.845 tokens; THEORY.md section 7."""
    assert expected_tokens([Fraction(9, 10), Fraction(7, 10), Fraction(1, 2)]) == Fraction(569, 200)


def test_speculation_pays_where_theory_says_so() -> None:
    """c_t 10, c_d 1, c_m 1, rate .8: with a verify cost of 12 it drafts, with 30 it does not."""
    assert settled([0.8] * 3, draft=1, verify=12, plain=10).best(3) == 3
    assert settled([0.8] * 3, draft=1, verify=30, plain=10).best(3) == 0


def test_survival_not_a_pooled_mean() -> None:
    """With a first candidate that is nearly always kept and later ones that are not, k = 1 wins."""
    assert settled([0.95, 0.05, 0.05, 0.05], draft=3, verify=10, plain=10).best(4) == 1


def test_long_blocks_where_drafting_is_cheap() -> None:
    """A nearly free, nearly perfect draft is asked for all that is allowed."""
    own = settled([0.97] * 6, draft=0.1, verify=10, plain=10)
    assert own.best(6) == 6
    assert own.best(2) == 2
    assert own.best(0) == 0


def test_useless_draft_is_left_alone_and_tried_again() -> None:
    """At acceptance 0 the choice is k = 0; after RETRY_ROUNDS plain rounds it is measured again."""
    own = settled([0.01, 0.01], draft=1, verify=10, plain=10)
    assert own.choose(4) == 0
    for _ in range(RETRY_ROUNDS):
        own.observe(sample(0, 0, verify=10, manage=0.0))
    assert own.choose(4) > 0
    own.observe(sample(2, 0))
    assert own.choose(4) == 0


def test_parts_that_follow_by_themselves_are_no_choices() -> None:
    """Choices are counted alike with candidates and without: a part of an answer is none, nor does
    it change which k a session keeps."""
    shared = SharedPolicy()
    own = SessionPolicy(shared)
    part = replace(sample(0, 0, verify=10, manage=0.0), is_later_part=True)
    for _ in range(FIRST_PLAIN_ROUNDS):
        own.observe(part)
    assert (shared.costs.num_drafted, shared.costs.num_plain) == (0, 0)
    for tokens in FIRST_TRIES:
        own.observe(sample(tokens, 0))
    assert own.choose(4) == 0, "plain decoding was never chosen yet"
    own.observe(sample(0, 0))
    assert (shared.costs.num_drafted, shared.costs.num_plain) == (len(FIRST_TRIES), 1)


@pytest.mark.parametrize("batch", [1, 16])
def test_trials_are_paid_from_a_share_of_the_time(batch: int) -> None:
    """While k = 0 is best, trials of all sessions together cost about 1 % of the time, whatever
    the number of sessions and of choices; parts pass time as rounds do."""
    shared = SharedPolicy(256)
    sessions = [SessionPolicy(shared) for _ in range(batch)]
    first = sample(0, 0, verify=10, manage=0.0, batch_size=batch)
    chosen, lost, time = [], 0.0, 0.0
    for index in range(4000):
        plain = replace(first, is_later_part=index % 8 > 0)
        for own in sessions:
            k = own.choose(4)
            if index >= 1000:
                chosen.append(k)
                lost += (4.0 * k + 3.0) * (k > 0)  # beyond a plain token, nothing being kept
                time += 10.0
            own.observe(sample(k, 0, draft=4.0, verify=12.0, batch_size=batch) if k else plain)
    assert any(chosen)
    assert lost <= 0.015 * time


def test_one_session_tries_and_all_learn() -> None:
    """Of many sessions that are asked at the same time one makes the trial; when its draft proves
    good, all draft."""
    shared = SharedPolicy(256)
    sessions = [SessionPolicy(shared) for _ in range(8)]

    def turn(num_accepted: int) -> list[int]:
        chosen = [own.choose(4) for own in sessions]
        for own, k in zip(sessions, chosen, strict=True):
            accepted = min(k, num_accepted)
            own.observe(sample(k, accepted, draft=0.5, verify=11.0 if k else 10.0, batch_size=8))
        return chosen

    for _ in range(1000):
        turn(0)
    assert {sum(k > 0 for k in turn(0)) for _ in range(1000)} == {0, 1}
    for _ in range(3000):
        turn(4)
    assert all(k > 0 for k in turn(4))


def test_a_trial_that_nobody_ends_is_given_up() -> None:
    """A session that takes a trial and ends leaves it to another, after a while."""
    own = settled([0.01, 0.01], draft=1, verify=10, plain=10)
    while not own.choose(4):
        own.observe(sample(0, 0, verify=10, manage=0.0))
    other = SessionPolicy(own._shared)
    waited = 0
    while waited <= 2 * LAPSE_ROUNDS and not other.choose(4):
        other.observe(sample(0, 0, verify=10, manage=0.0))
        waited += 1
    assert 0 < waited <= 2 * LAPSE_ROUNDS


def test_waits_grow_while_candidates_are_out_of_question() -> None:
    """Each trial that only confirms it doubles the wait, up to a bound."""
    own = settled([0.01, 0.01], draft=6, verify=12, plain=10)
    waits = []
    for _ in range(7):
        waits.append(0)
        while not (k := own.choose(4)):
            own.observe(sample(0, 0, verify=10, manage=0.0))
            waits[-1] += 1
        own.observe(sample(k, 0, draft=6, verify=12))
    assert waits[3] > 1.9 * waits[2] > 3.6 * waits[1]
    assert waits[-1] <= 1.1 * waits[-2]


def test_a_change_of_acceptance_is_seen_at_once() -> None:
    """Rates known from many blocks give way to what is hardly chance: a run of rejections while
    all draft, one trial that keeps what was never kept. Chance alone changes nothing."""
    known = SharedAcceptance()
    for index in range(400):
        assert not known.observe(1, int(index % 5 > 0), is_trial=False)
    assert known.rates(1)[0] == pytest.approx(0.8, abs=0.02)
    seen = [known.observe(1, 0, is_trial=False) for _ in range(15)]
    assert any(seen)
    assert known.known(0) < 0.5
    for _ in range(40):
        known.observe(1, 0, is_trial=False)
    assert known.rates(1)[0] < 0.15
    assert known.observe(3, 3, is_trial=True)
    assert known.known(0) <= 1 / 40


def test_requests_with_a_k_of_their_own_choose_for_nobody() -> None:
    """Their rounds teach what things cost; what the next request keeps to is not their k."""
    shared = SharedPolicy()
    asked, fixed = SessionPolicy(shared), SessionPolicy(shared)
    for _ in range(100):
        fixed.observe(sample(3, 0, draft=0.5))
        fixed.observe(sample(0, 0, verify=10, manage=0.0))
    fixed.observe(sample(3, 0, draft=0.5))
    assert shared.load.kept is None
    assert asked.choose(3) == 0


def test_bad_luck_does_not_end_drafting() -> None:
    """What is given up is seldom measured: candidates that seem to lose by less than chance may
    explain are kept; those that clearly lose are not."""
    own = settled([0.75] * 2, draft=0.5, verify=11.5, plain=10)
    assert own.choose(2) == 2

    def margin() -> float:
        found = own._shared.goodputs(2, own.rates(2))
        return found[0] / max(found[1:])

    unlucky = 0
    while margin() < 1.025:
        own.observe(sample(2, 0, draft=0.5, verify=11.5))
        unlucky += 1
        assert unlucky < 100
    assert own.choose(2) > 0
    for _ in range(2 * unlucky):
        own.observe(sample(2, 0, draft=0.5, verify=11.5))
    assert own.choose(2) == 0


def test_a_chain_that_others_need_is_not_the_price_of_a_token() -> None:
    """The last token of a command waits for the chain of passes it is in: that says nothing of
    what a token takes."""
    costs = Costs()
    part = RoundSample(0, 8, 0, 0, 0.0, 0.036, 0.0, 4, 4, 0.035, is_later_part=True)
    for _ in range(50):
        costs.add(part, 4.0, 0.98)
    before = costs.plain_s(256, 4.0)
    for _ in range(50):
        costs.add(replace(part, num_tokens=1, is_cut=True), 4.0, 0.98)
    assert costs.plain_s(256, 4.0) == before


def test_waiting_for_others_chains_is_no_cost_of_candidates() -> None:
    """Alone among plain decoding a round waits for a chain of passes: if all draft it does not."""
    alone = RoundSample(4, 2, 4, 1, 0.001, 0.040, 0.0, 4, 8, 0.005, queue_s=0.030)
    assert alone.other_s == pytest.approx(0.040 - 0.005 - 0.030 + 0.0025)
    together = replace(alone, target_s=0.014, queue_s=0.004)
    assert together.other_s == pytest.approx(0.014 - 0.005)
    costs = Costs()
    costs.add(alone, 4.0, 1.0)
    # The program is made for five rows of each of the four: so it costs if all draft.
    assert costs.passes.at(20) == pytest.approx(0.005)


def test_rounds_drafted_ahead_say_how_often_the_draft_is_waited_for() -> None:
    """And nothing of what its proposals take: a longer block, which was never foreseen, looks no
    dearer for it, and a shorter one no cheaper."""
    costs = Costs()

    def draft_s(k: int) -> float:
        return 0.0002 + 0.00015 * k

    for index in range(400):
        k = 5 if index % 40 == 39 else 4
        ahead = k == 4 and index % 2 == 0
        waited_s = 0.0 if ahead else draft_s(k)
        costs.add(
            RoundSample(k, 3, 3, 2, waited_s, 0.0045, 0.001, forward_s=0.0042, was_ahead=ahead),
            1.0,
            0.98,
        )
    whole = costs.round_s(4, 1.0) - costs.round_s(5, 1.0)
    assert costs.draft.at(5) == pytest.approx(draft_s(5), rel=0.05)
    assert costs.draft.at(3) == pytest.approx(draft_s(3), rel=0.05)
    assert costs.waited.at(0.0) == pytest.approx(0.5, abs=0.05)
    assert whole < 0


def test_a_new_load_begins_with_what_the_nearest_knows() -> None:
    """Costs at a load never met are those of the nearest, scaled; nothing is tried from nothing."""
    shared = SharedPolicy(256)
    own = SessionPolicy(shared)
    for _ in range(200):
        own.observe(sample(3, 2, draft=0.5, verify=11, batch_size=4))
        own.observe(sample(0, 0, verify=10, manage=0.0, batch_size=4))
    there = shared.costs
    own.observe(sample(0, 0, verify=10, manage=0.0, batch_size=16))
    here = shared.costs
    assert here is not there
    assert here.is_carried
    assert shared.first_try() is None
    assert here.draft.at(3) == pytest.approx(there.draft.at(3))
    assert here.other.at(0) == pytest.approx(2 * there.other.at(0))
    assert here.passes.at(64) > here.passes.at(16) > 0


def test_plain_decoding_is_measured_again() -> None:
    """While drafting wins, k = 0 is measured once in RETRY_ROUNDS, so that a change is noticed."""
    own = settled([0.9] * 3, draft=0.5, verify=10, plain=10)
    chosen = []
    for _ in range(RETRY_ROUNDS + 50):
        chosen.append(own.choose(3))
        own.observe(sample(chosen[-1], chosen[-1], draft=0.5))
    assert chosen.count(0) == 1


def test_one_more_candidate_is_tried() -> None:
    """Where the longest block known is the best one, a longer one is measured now and then."""
    own = settled([0.97] * 3, draft=0.1, verify=10, plain=10)
    longest = 0
    for _ in range(2 * LONGER_ROUNDS + 2):
        k = own.choose(8)
        longest = max(longest, k)
        own.observe(sample(k, k, draft=0.1))
    assert longest > 3


def test_first_rounds_measure_both_ways() -> None:
    """A new coordinator drafts blocks of different length, then decodes plainly, then decides."""
    own = SessionPolicy(SharedPolicy())
    chosen = []
    for _ in range(len(FIRST_TRIES) + FIRST_PLAIN_ROUNDS):
        chosen.append(own.choose(8))
        own.observe(sample(chosen[-1], 0))
    assert chosen == [*FIRST_TRIES, 0, 0]


def test_choice_stays_within_the_limit() -> None:
    """Whatever was seen, k is in [0, limit], first rounds and measurements included."""
    own = SessionPolicy(SharedPolicy())
    for index in range(600):
        limit = index % 9
        k = own.choose(limit)
        assert 0 <= k <= limit
        own.observe(sample(k, index % (k + 1)))


def test_choosing_changes_nothing() -> None:
    """Asked any number of times the policy says the same: the protocol may ask twice."""
    own = settled([0.9, 0.5], draft=1, verify=10, plain=10)
    assert {own.choose(4) for _ in range(10 * RETRY_ROUNDS)} == {own.choose(4)}


def test_costs_belong_to_their_batch_size() -> None:
    """At batch 32 a verify is measured to cost what speculation gains: k = 0 there, not at 1."""
    shared = SharedPolicy()
    own = SessionPolicy(shared)
    for _ in range(100):
        own.observe(sample(3, 2, draft=0.5, verify=11, batch_size=1))
        own.observe(sample(0, 0, verify=10, manage=0.0, batch_size=1))
    assert own.best(3) > 0
    for _ in range(100):
        own.observe(sample(3, 2, draft=0.5, verify=40, batch_size=32))
        own.observe(sample(0, 0, verify=10, manage=0.0, batch_size=32))
    assert own.best(3) == 0
    own.observe(sample(0, 0, verify=10, manage=0.0, batch_size=1))
    assert own.best(3) > 0


def test_own_rounds_outweigh_the_others() -> None:
    """A request that accepts nothing stops drafting though all others accept everything."""
    shared = SharedPolicy()
    others, own = SessionPolicy(shared), SessionPolicy(shared)
    for _ in range(100):
        others.observe(sample(3, 3, draft=0.5))
        others.observe(sample(0, 0, verify=10, manage=0.0))
    assert own.best(3) == 3
    for _ in range(80):
        own.observe(sample(3, 0, draft=0.5))
    assert own.rates(1)[0] < others.rates(1)[0]
    assert own.best(3) == 0


def test_parts_of_an_answer_cost_what_each_takes() -> None:
    """A command's own cost is shared by all its steps; a part's by the tokens it brought."""
    costs = Costs()
    first = RoundSample(0, 1, 0, 0, 0.0, 0.014, 0.002, forward_s=0.008)
    part = RoundSample(0, 8, 0, 0, 0.0, 0.0656, 0.0, forward_s=0.064, is_later_part=True)
    for sample in (first, *[part] * 7) * 4:
        costs.add(sample, 1.0, 1.0)
    assert costs.plain_s(64, 1.0) == pytest.approx(0.008 + 0.008 / 64 + 0.0016 / 8)


@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
def test_line_finds_its_slope(slope: float) -> None:
    """Times at several lengths are extended to others."""
    line = Line(relative_slope=0.3)
    for index in range(200):
        x = 1 + index % 4
        line.add(x, 10 + slope * x)
    assert line.at(6) == pytest.approx(10 + slope * 6, rel=0.02)


def test_line_without_spread_assumes_a_little() -> None:
    """One length alone gives the assumed slope, never a negative time."""
    line = Line(relative_slope=0.1)
    for _ in range(5):
        line.add(4, 20)
    assert 20 < line.at(8) < 40
    assert line.at(0) > 0


def test_policy_is_blind_to_tokens() -> None:
    """Nothing that reaches the policy holds a token id, a row or an unjudged candidate."""
    fields = set(RoundSample.__dataclass_fields__)
    assert fields == {
        "num_draft_tokens",
        "num_tokens",
        "num_judged",
        "num_accepted",
        "draft_s",
        "target_s",
        "manage_s",
        "batch_size",
        "batch_rows",
        "forward_s",
        "queue_s",
        "is_later_part",
        "is_cut",
        "was_ahead",
    }
    taken = inspect.signature(SessionPolicy.choose).parameters
    assert list(taken) == ["self", "limit"]
    for module in (policy, costs_module, acceptance, trials):
        for banned in ("torch", "asyncio", "time", "random", "logging", "numpy"):
            assert f"import {banned}" not in inspect.getsource(module)
