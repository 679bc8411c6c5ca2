"""What may go wrong in a run, and what is asked of it: one dataclass each, drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True)
class Faults:
    """Rates and numbers of faults. Rates are per message or per request; counts are per run.

    Messages (links to draft and target only, as TCP keeps streams whole): drop, duplicate, replay
    (an old message turns up later, also after its link or epoch ended), delay. Connections: resets,
    partitions, one_way partitions. Processes: crashes of each kind, stalls (a pass takes long),
    drains (one ends as it is asked to), pass_failures (the device fails, before or after writing).
    Draft content: lie. Memory of a service: forget (an idle session's confirmed tokens are cut),
    garble (cut, and others in their place), so that prefixes disagree. Callers: cancel, deadline,
    client_crash. Page exhaustion and preemption come from `Setup`: pools of few pages.
    """

    latency_s: float = 0.002
    delay: float = 0.0
    delay_s: float = 0.5
    drop: float = 0.0
    duplicate: float = 0.0
    replay: int = 0
    resets: int = 0
    partitions: int = 0
    one_way: int = 0
    target_crashes: int = 0
    draft_crashes: int = 0
    coordinator_crashes: int = 0
    stalls: int = 0
    drains: int = 0
    pass_failures: int = 0
    lie: float = 0.0
    forget: int = 0
    garble: int = 0
    cancel: float = 0.0
    deadline: float = 0.0
    client_crash: float = 0.0
    window_s: float = 1.0  # faults are spread over this much of the beginning


@dataclass(frozen=True)
class Setup:
    """How the system is built and what is asked of it. steady: latency and passes do not vary.

    chain_lens: the target takes passes of plain decoding in chains of these lengths, drawn anew
    each time, and answers after each chain, as a device does. nan_after: prefixes after which a
    draft's logits are NaN; nan_share: of all prefixes.
    """

    seed: int
    vocab_size: int = 5
    own_weight: float = 0.3
    page_size: int = 3
    target_pages: int = 64
    draft_pages: int = 64
    num_targets: int = 2
    num_drafts: int = 2
    num_coordinators: int = 2
    num_requests: int = 2
    prefill_chunk: int = 4
    token_budget: int = 8
    max_running: int = 64
    num_draft_tokens: int | None = None
    plain_steps: int = 4
    chain_lens: tuple[int, ...] = (1,)
    num_ahead: int = 0
    audit_ratio: float = 0.0
    draft_prefill: str = "auto"
    one_device: bool = False
    nan_after: tuple[tuple[int, ...], ...] = ()
    nan_share: float = 0.0
    max_unread_chunks: int = 64
    pass_s: float = 0.003
    steady: bool = False
    rules: tuple[str, ...] = ("greedy", "coupled", "residual")
    placements: tuple[str, ...] = ("target", "coordinator")
    max_tokens: int = 12
    max_prompt: int = 9
    faults: Faults = field(default_factory=Faults)


# Each fault with how it is drawn when a run has it.
_DRAWS: dict[str, Callable[[random.Random], float | int]] = {
    "delay": lambda rng: rng.choice((0.02, 0.2)),
    "drop": lambda rng: rng.choice((0.01, 0.1)),
    "duplicate": lambda rng: rng.choice((0.02, 0.2)),
    "replay": lambda rng: rng.randint(1, 6),
    "resets": lambda rng: rng.randint(1, 4),
    "partitions": lambda rng: rng.randint(1, 2),
    "one_way": lambda rng: rng.randint(1, 3),
    "target_crashes": lambda rng: rng.randint(1, 3),
    "draft_crashes": lambda rng: rng.randint(1, 3),
    "coordinator_crashes": lambda rng: rng.randint(1, 2),
    "stalls": lambda rng: rng.randint(1, 3),
    "drains": lambda rng: rng.randint(1, 2),
    "pass_failures": lambda rng: rng.randint(1, 3),
    "lie": lambda rng: rng.choice((0.1, 0.5)),
    "forget": lambda rng: rng.randint(1, 3),
    "garble": lambda rng: rng.randint(1, 3),
    "cancel": lambda rng: rng.choice((0.2, 0.7)),
    "deadline": lambda rng: rng.choice((0.2, 0.7)),
    "client_crash": lambda rng: rng.choice((0.2, 0.7)),
}
FAULT_NAMES = tuple(_DRAWS)


def drawn_setup(seed: int) -> Setup:
    """The run of a seed: about half the kinds of fault it could have, sizes small and awkward."""
    rng = random.Random(f"setup {seed}")
    share = rng.choice((0.15, 0.3, 0.5))
    chosen = {name: draw(rng) for name, draw in _DRAWS.items() if rng.random() < share}
    faults = Faults(
        latency_s=rng.choice((0.0005, 0.002, 0.01)), window_s=rng.choice((0.2, 0.5)), **chosen
    )
    tiny = rng.random() < 0.4
    max_tokens = rng.randint(3, 16)
    page_size = rng.choice((1, 2, 3, 4))
    needed = -(-(9 + max_tokens) // page_size)
    pages = [needed + rng.randint(0, needed // 2) if tiny else 64 for _ in range(2)]
    setup = Setup(
        seed=seed,
        vocab_size=rng.randint(3, 6),
        own_weight=rng.choice((0.0, 0.2, 0.5)),
        page_size=page_size,
        target_pages=pages[0],
        draft_pages=pages[1],
        num_targets=rng.choice((1, 2)),
        num_drafts=rng.choice((0, 1, 1, 1, 2, 2)),
        num_coordinators=rng.choice((1, 2)),
        num_requests=rng.choice((2, 3, 4) if tiny else (1, 1, 2, 3)),
        prefill_chunk=rng.choice((2, 4, 64)),
        token_budget=rng.choice((4, 8, 64)),
        max_running=rng.choice((1, 2, 64, 64)),
        num_draft_tokens=rng.choice((None, None, 1, 2, 3, 4)),
        audit_ratio=rng.choice((0.0, 0.0, 0.5)),
        draft_prefill=rng.choice(("auto", "parallel", "after_first_token")),
        one_device=rng.random() < 0.3,
        max_unread_chunks=rng.choice((1, 64)),
        max_tokens=max_tokens,
        faults=faults,
        plain_steps=rng.choice((1, 4, 16, 64)),
        chain_lens=rng.choice(((1,), (1, 2, 3), (4, 1), (8,))),
    )
    if rng.random() < 0.15:
        setup = replace(setup, num_draft_tokens=0)
    nan_share = random.Random(f"nan {seed}").choice((0.0, 0.0, 0.05, 0.3))
    return replace(setup, num_ahead=rng.choice((0, 3, 16)), nan_share=nan_share)


def without(setup: Setup, *names: str) -> Setup:
    """The same run without these faults (all of them, where none is named)."""
    defaults = {each.name: each.default for each in fields(Faults)}
    changes = {name: defaults[name] for name in names or FAULT_NAMES}
    return replace(setup, faults=replace(setup.faults, **changes))
