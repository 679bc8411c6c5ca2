"""Who may run now, who waits, who is refused: bounded in both, before any work is done.

Owns the counts of running and waiting samples. What does not fit gets TooBusy with a retry delay
(RESOURCE_EXHAUSTED and RetryInfo on the wire). A tenant at its own limit waits while others pass.
`Choice` says who goes first: by default the tenant with the fewest running samples, in order of
arrival among equals, so that one tenant's burst does not shut out another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from coordinator.tenants import NO_LIMITS, TenantLimits
from specmesh.config import AdmissionSettings
from specmesh.errors import NotReady, TooBusy

Choice = Callable[[Sequence[str], Mapping[str, int]], int]
LimitsOf = Callable[[str], TenantLimits]


def fewest_running_first(waiting: Sequence[str], running: Mapping[str, int]) -> int:
    """Index of the tenant to serve next. waiting: in order of arrival; running: samples each."""
    return min(range(len(waiting)), key=lambda index: (running.get(waiting[index], 0), index))


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    num_samples: int
    admitted: asyncio.Future[None]


class Admission:
    """Bounds of one coordinator replica. Event-loop only."""

    def __init__(
        self,
        settings: AdmissionSettings,
        limits_of: LimitsOf = lambda tenant: NO_LIMITS,
        choose: Choice = fewest_running_first,
    ) -> None:
        """limits_of: a tenant's bounds within the replica's; asked anew each time."""
        self._settings = settings
        self._limits_of = limits_of
        self._choose = choose
        self._running: Counter[str] = Counter()
        self._waiters: list[_Waiter] = []
        self._num_prepared = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Samples that run."""
        return sum(self._running.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiters)

    def close(self) -> None:
        """Admit nobody any more; those who wait are refused."""
        self._is_closed = True
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(_draining())
        self._waiters.clear()

    async def wait_idle(self) -> None:
        """Wait until nothing runs."""
        while self.num_running:
            self._changed.clear()
            await self._changed.wait()

    @contextmanager
    def preparing(self, tenant: str) -> Iterator[None]:
        """Hold a place for work that must come before `admit`: reading a large prompt.

        So that overload costs no work, who would be refused by `admit` now is refused here, and
        those who prepare count like those who wait. Raises TooBusy and NotReady as `admit` does.
        """
        if self._is_closed:
            raise _draining()
        if self.num_running >= self._settings.max_running:
            self._check_room(tenant)
        if self._num_prepared >= self._settings.max_running + self._settings.max_waiting:
            raise self._too_busy(f"{self._num_prepared} large requests are read already")
        self._num_prepared += 1
        try:
            yield
        finally:
            self._num_prepared -= 1

    @asynccontextmanager
    async def admit(self, tenant: str, num_samples: int) -> AsyncIterator[None]:
        """Hold a place for a request's samples, waiting for it if needed.

        A request of more samples than may run at all, or than its tenant may run, counts as that
        many. Raises TooBusy when the queue is full or the wait too long, NotReady while draining.
        """
        places = min(num_samples, self._settings.max_running, self._most_running(tenant))
        await self._enter(tenant, places)
        try:
            yield
        finally:
            self._running[tenant] -= places
            if not self._running[tenant]:
                del self._running[tenant]
            self._serve()
            self._changed.set()

    async def _enter(self, tenant: str, places: int) -> None:
        if self._is_closed:
            raise _draining()
        if self._fits(places) and self._may_run(tenant, places) and not self._eligible():
            self._running[tenant] += places
            return
        self._check_room(tenant)
        waiter = _Waiter(tenant, places, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._settings.max_wait_s):
                await waiter.admitted
        except BaseException as error:
            self._give_up(waiter)
            if isinstance(error, TimeoutError):
                wait_s = self._settings.max_wait_s
                raise self._too_busy(f"not admitted within {wait_s:g} s") from None
            raise

    def _check_room(self, tenant: str) -> None:
        """Raise TooBusy where one more may not wait."""
        if len(self._waiters) >= self._settings.max_waiting:
            raise self._too_busy(f"{len(self._waiters)} requests wait already")
        most = self._limits_of(tenant).max_waiting
        num_of_tenant = sum(waiter.tenant == tenant for waiter in self._waiters)
        if most is not None and num_of_tenant >= most:
            raise self._too_busy(f"{num_of_tenant} requests of this tenant wait already")

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif (
            waiter.admitted.done()
            and not waiter.admitted.cancelled()
            and (waiter.admitted.exception() is None)
        ):
            # Admitted in the very moment it gave up: the place goes to the next.
            self._running[waiter.tenant] -= waiter.num_samples
        self._serve()

    def _fits(self, places: int) -> bool:
        return self.num_running + places <= self._settings.max_running

    def _most_running(self, tenant: str) -> int:
        most = self._limits_of(tenant).max_running
        return self._settings.max_running if most is None else most

    def _may_run(self, tenant: str, places: int) -> bool:
        """Whether the tenant's own limit allows it. A limit lowered meanwhile blocks nobody."""
        running = self._running.get(tenant, 0)
        return not running or running + places <= self._most_running(tenant)

    def _eligible(self) -> list[_Waiter]:
        """Those whom only the replica's own bound keeps waiting."""
        return [each for each in self._waiters if self._may_run(each.tenant, each.num_samples)]

    def _serve(self) -> None:
        while eligible := self._eligible():
            tenants = [waiter.tenant for waiter in eligible]
            chosen = eligible[self._choose(tenants, self._running)]
            if not self._fits(chosen.num_samples):
                return
            self._waiters.remove(chosen)
            if not chosen.admitted.done():
                self._running[chosen.tenant] += chosen.num_samples
                chosen.admitted.set_result(None)

    def _too_busy(self, message: str) -> TooBusy:
        """The delay grows with what waits already, in units of a full house."""
        num_ahead = len(self._waiters) + self._num_prepared
        crowd = 1 + num_ahead / self._settings.max_running
        return TooBusy(message, retry_after_s=self._settings.retry_after_s * crowd)


def _draining() -> NotReady:
    return NotReady("this coordinator is draining; try another", retry_after_s=1.0)
