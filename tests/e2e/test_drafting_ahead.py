"""Rounds drafted ahead through a whole stack: services, links and coordinator over real gRPC."""

from __future__ import annotations

import asyncio
import threading

import pytest

from coordinator.commands import Ahead
from coordinator.foresight import Foresight
from specmesh.client import GenerateOptions
from specmesh.config import LinkSettings, SpeculationSettings
from tests.e2e.stack import Stack, recorded_rounds, running_stack

PROMPT = [1, 2, 3, 4, 5]
NUM_GATED = 8  # rounds whose verdict waits for what is drafted ahead
PATIENT = LinkSettings(draft_deadline_s=60.0)


def options(seed: int) -> GenerateOptions:
    """A request whose tokens depend on its seed alone."""
    return GenerateOptions(
        seed=seed, rule="residual", num_draft_tokens=3, max_tokens=40, ignore_eos=True
    )


class Gate:
    """Holds the target's pass n until n proposals were drafted ahead of, as a slow target would."""

    def __init__(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._num_kept = self._num_passes = 0
        keep = Foresight.keep

        def counting(
            foresight: Foresight, drafted: tuple[int, ...], num_asked: int, ahead: Ahead
        ) -> None:
            keep(foresight, drafted, num_asked, ahead)
            with self._changed:
                self._num_kept += 1
                self._changed.notify()

        monkeypatch.setattr(Foresight, "keep", counting)
        decoder: object = stack.targets[0].decoder
        decoder.before_pass = self._wait  # type: ignore[attr-defined]  # the fake model

    def _wait(self) -> None:
        wanted, self._num_passes = self._num_passes, self._num_passes + 1
        if wanted <= NUM_GATED:
            with self._changed:
                assert self._changed.wait_for(lambda: self._num_kept >= wanted, 30)


async def test_rounds_that_were_foreseen_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text as without; of the rounds that had the time most begin with candidates that are
    there, nothing was refuted, and no page is kept."""
    records = recorded_rounds(monkeypatch)
    async with running_stack(links=PATIENT) as stack:
        plain = await stack.client.generate(PROMPT, options(3))
        assert not any(record.was_ahead for record in records)
    records.clear()
    async with running_stack(links=PATIENT, speculation=SpeculationSettings(num_ahead=64)) as stack:
        Gate(stack, monkeypatch)
        answer = await stack.client.generate(PROMPT, options(3))
        await stack.all_pages_free()
        for service in (*stack.targets, *stack.drafts):
            service.pool.check_integrity()
    assert answer.text == plain.text
    stats = answer.finished[0].speculation
    assert set(stats.fallback_rounds) <= {"budget"}
    drafted = [record for record in records if record.num_draft_tokens]
    began = [record.was_ahead for record in drafted[:NUM_GATED]]
    assert not began[0]
    assert sum(began) >= NUM_GATED // 2
    assert all(record.redraw_mismatch is None for record in records)


@pytest.mark.parametrize("seed", range(4))
async def test_many_streams_give_what_they_give_without(seed: int) -> None:
    """Streams that overtake each other's work ahead: the same texts, and every page is free."""
    texts = []
    for num_ahead in (0, 16):
        speculation = SpeculationSettings(num_ahead=num_ahead)
        async with running_stack(links=PATIENT, speculation=speculation) as stack:
            answers = await asyncio.gather(
                *(stack.client.generate(PROMPT[i:], options(seed + i)) for i in range(4))
            )
            await stack.all_pages_free()
        texts.append([answer.text for answer in answers])
    assert texts[0] == texts[1]
