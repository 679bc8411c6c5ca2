"""The plan of one session that tests of the protocol share, and the output it must have."""

from __future__ import annotations

from coordinator.session_plan import Rule, SessionPlan
from tests.sim.fakes import VOCAB_SIZE, expected_output

PROMPT = (5, 6, 7)
NUM_TOKENS = 30
WANTED = expected_output(PROMPT, NUM_TOKENS)


def plan_of(**changes: object) -> SessionPlan:
    """Room for NUM_TOKENS behind PROMPT; the policy chooses k unless num_draft_tokens is given."""
    fields: dict[str, object] = {
        "prompt": PROMPT,
        "max_len": len(PROMPT) + NUM_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "rule": Rule.COUPLED,
    }
    return SessionPlan(**{**fields, **changes})  # type: ignore[arg-type]  # test fields
