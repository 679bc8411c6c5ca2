"""The faults: which there are, which come in a run of a seed, and how each is done and undone."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.deployment import NUM_REPLICAS, Deployment

SIDES = ("target", "draft", "coordinator", "client")
WIRES = ("coordinator-target", "coordinator-draft", "client-coordinator")
NONE = "none"
KINDS = (
    *(f"kill {side}" for side in SIDES),
    *(f"stop {side}" for side in SIDES),
    *(f"{how} {wire}" for how in ("cut", "hold", "hold there", "hold back") for wire in WIRES),
    *(f"slow {wire}" for wire in WIRES),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ends: the numbers of the replicas it is for. loses: what a hold kept is lost."""

    kind: str
    ends: tuple[int, ...] = ()
    lasts_s: float = 0.0
    loses: bool = False


def drawn_faults(seed: int, count: int, every_none: int = 10) -> list[Fault]:
    """`count` faults, every kind as often as the others, and a stretch without any after every
    `every_none` of them, for comparison."""
    rng = random.Random(f"{seed} faults")
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += rng.sample(KINDS, len(KINDS))
    faults: list[Fault] = []
    for index, kind in enumerate(kinds[:count]):
        if index % every_none == every_none - 1:
            faults.append(Fault(NONE))
        num_ends = 2 if "-" in kind else 1
        ends = tuple(rng.randrange(NUM_REPLICAS) for _ in range(num_ends))
        lasts_s = rng.choice((0.2, 0.5, 1.0, 2.0)) if kind[:3] not in ("kil", "cut") else 0.0
        faults.append(Fault(kind, ends, lasts_s, loses=rng.random() < 0.5))
    return faults


class Injector:
    """Does faults to a deployment, and restarts what was killed."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._restarts: dict[str, asyncio.Task[None]] = {}

    async def make_ready(self, fault: Fault) -> None:
        """Wait until the fault can be done: a service keeps one replica that works."""
        side = fault.kind.split()[-1]
        names = {each.name for each in self._deployment.of_side(side)}
        if "-" in side:
            # Behind a dead replica there is nothing to cut off.
            near, far = side.split("-")
            names = {f"{near}{fault.ends[0]}"} | {e.name for e in self._deployment.of_side(far)}
        waiting = [task for name, task in self._restarts.items() if name in names]
        await asyncio.gather(*waiting)

    async def inject(self, fault: Fault) -> None:
        """Do it and, where it lasts, undo it. A killed service is started again meanwhile."""
        how, _, where = fault.kind.rpartition(" ")
        if fault.kind == NONE:
            return
        if how in ("kill", "stop"):
            await self._to_process(how, f"{where}{fault.ends[0]}", fault.lasts_s)
            return
        near, far = where.split("-")
        proxy = self._deployment.proxies[f"{near}{fault.ends[0]}-{far}{fault.ends[1]}"]
        if how == "cut":
            proxy.cut()
            return
        if how == "slow":
            proxy.slow(0.05)
        else:
            proxy.hold(there=how != "hold back", back=how != "hold there")
        await asyncio.sleep(fault.lasts_s)
        if fault.loses and how != "slow":
            proxy.lose()
        else:
            proxy.release()

    async def _to_process(self, how: str, name: str, lasts_s: float) -> None:
        if name.startswith("client"):
            process = self._deployment.clients[int(name[-1])]
            if how == "kill":
                process.signal(signal.SIGKILL)
                return
            process.signal(signal.SIGSTOP)
            await asyncio.sleep(lasts_s)
            process.signal(signal.SIGCONT)
            return
        replica = self._deployment.replicas[name]
        if how == "kill":
            await replica.kill()
            self._restarts[name] = asyncio.create_task(self._restart(name))
            return
        replica.signal(signal.SIGSTOP)
        await asyncio.sleep(lasts_s)
        replica.signal(signal.SIGCONT)

    async def _restart(self, name: str) -> None:
        replica = self._deployment.replicas[name]
        await replica.start()
        await replica.wait_ready()

    async def settle(self) -> None:
        """Wait until everything that was killed is back."""
        await asyncio.gather(*self._restarts.values())


async def roll(deployment: Deployment, names: Sequence[str] = ()) -> list[tuple[str, int, float]]:
    """SIGTERM, end and new start of each replica in turn, each when the one before is ready.

    Returns name, exit code and seconds until the new one was ready, of each.
    """
    loop = asyncio.get_running_loop()
    done = []
    for name in names or list(deployment.replicas):
        replica = deployment.replicas[name]
        began = loop.time()
        code = await replica.terminate()
        await replica.start()
        await replica.wait_ready()
        done.append((name, code, loop.time() - began))
    return done
