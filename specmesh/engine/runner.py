"""The engine: one worker that owns a device, its sessions and everything they change.

Event loops hand frames in and get results back by callback; no lock is held over device work, and
nothing that blocks runs on an event loop, so health checks and cancellations answer meanwhile. The
worker is a generator that yields where it waits: a thread runs it (`start`), or the service's event
loop while it polls (`start_on_loop`). Must not know what the messages of a role mean
(specmesh/engine/role.py) or how streams work (specmesh/engine/links.py).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from protos.specmesh.v1 import session_pb2
from specmesh.engine.ahead import WorkAhead
from specmesh.engine.busy_poll import EnginePoller
from specmesh.engine.commands import CommandDesk, Observers
from specmesh.engine.executor import Device, Executor, StepExecutor, StepOutcome
from specmesh.engine.pages import PageTables
from specmesh.engine.role import Finished, Part, Role, isolated
from specmesh.engine.scheduler import Scheduler, Step, Task
from specmesh.engine.sessions import Limits, Link, Request, SessionTable
from specmesh.engine.waits import Apart, Arrival, Aside, Leaving, Waiting, block_on
from specmesh.errors import InternalError, NumericFault, SpecmeshError, TooBusy

logger = logging.getLogger(__name__)

EXPIRY_PERIOD_S = 1.0  # how often idle sessions are looked for
# Before work that nobody waits for: the loop that sends the last answer needs the interpreter.
PAUSE_S = 0.0003
FLOOD_FACTOR = 4  # unread commands, as a multiple of those that may wait, before a link is ended


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Bounds of the serving loop; see EngineSettings. warm_up_lens: passes before serving."""

    token_budget: int = 512
    prefill_chunk: int = 256
    max_waiting_commands: int = 1024
    session_idle_s: float = 60.0
    warm_up_lens: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Commands as they arrived. room: how many of them may wait."""

    link: Link
    commands: Sequence[Any]
    arrived_ns: int
    room: int


class Engine:
    """Serves the sessions of one device. Start it, submit frames, stop it."""

    def __init__(
        self,
        device: Device,
        role: Role,
        limits: Limits,
        options: EngineOptions,
        observers: Observers,
        make_executor: Callable[[Device, Callable[[], int]], Executor] = StepExecutor,
    ) -> None:
        """make_executor: what runs passes, given the device and the clock in nanoseconds."""
        self.limits = limits
        self._options = options
        self._pool = device.pool
        self._role = role
        self._observers = observers
        self._table = SessionTable(limits, observers.clock_ns)
        pages = PageTables(device.pool)
        self._scheduler = Scheduler(
            pages,
            options.token_budget,
            options.prefill_chunk,
            lambda task: self._desk.answer_deferred(task),
            lambda tainted: self._executor.clear(tainted),
        )
        self._desk = CommandDesk(self._table, self._scheduler, role, observers)
        self._executor = make_executor(device, observers.clock_ns)
        self._ahead = WorkAhead(self._table, pages, self._executor, role, self._decided)
        self._inbox: queue.SimpleQueue[Callable[[], None] | _Frame | None] = queue.SimpleQueue()
        self._held: deque[Callable[[], None] | _Frame | None] = deque()  # read before its time
        self._num_submitted = 0
        self._num_unread: dict[Link, int] = {}  # commands of a link that the worker has not read
        self._submit_lock = threading.Lock()
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._serve_on_thread, name=f"{role.wire.side}-engine"
        )
        self._poller: EnginePoller | None = None
        self._next_expiry_ns = 0
        self._empty_waiters: list[Future[None]] = []
        self._finishing: list[Link] = []
        # Called on the worker when it cannot go on: a lost device, or a bug outside any command.
        self.on_death: Callable[[], None] = lambda: None
        observers.metrics.watch(
            free_pages=lambda: self._pool.num_free,
            total_pages=lambda: self._pool.num_pages,
            num_sessions=lambda: len(self._table),
            num_waiting=lambda: self.num_waiting,
        )

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Warm the model up, then serve. Returns when commands will be answered at full speed.

        Raises what the warm-up raises; nothing is served then.
        """
        self._thread.start()
        self._warm.result()

    def start_on_loop(self, loop: asyncio.AbstractEventLoop, awake_s: float) -> None:
        """In place of `start`: warm up on this thread, then serve on `loop`, which polls.

        `loop` runs on another thread, this one blocks until it serves. awake_s: how long after its
        last work the loop polls on before it sleeps again. From then on `loop` is the only thread
        that may hand anything in. Raises what the warm-up raises.
        """
        self._warm_up()
        self._warm.result()

        async def serve() -> None:
            self._executor.enter_thread()
            self._poller = EnginePoller(loop, self._serving(), awake_s)

        asyncio.run_coroutine_threadsafe(serve(), loop).result()

    def stop(self) -> None:
        """End the worker after the pass in flight. Sessions are dropped. Blocks until it ended.

        Raises RuntimeError on the loop that serves, which cannot wait for itself.
        """
        if self._poller is not None and self._poller.is_on_loop():
            raise RuntimeError("stop blocks: not on the loop that serves")
        self._put(None)
        if self._thread.is_alive():
            self._thread.join()
        if self._poller is not None:
            self._poller.ended.result()

    def _put(self, item: Callable[[], None] | _Frame | None) -> None:
        self._inbox.put(item)
        if self._poller is not None:
            self._poller.wake()

    def submit(self, link: Link, commands: Sequence[Any]) -> bool:
        """Hand in one frame's commands, in order. Never blocks; too many are answered TOO_BUSY.

        False, and nothing taken, where even those answers would pile up: this peer does not wait
        for any. What other links have sent does not count against it.
        """
        arrived_ns = self._observers.clock_ns()
        most = self._options.max_waiting_commands
        with self._submit_lock:
            num_unread = self._num_unread.get(link, 0)
            if num_unread and num_unread + len(commands) > FLOOD_FACTOR * most:
                return False
            room = most - self.num_waiting
            self._num_submitted += len(commands)
            self._num_unread[link] = num_unread + len(commands)
        self._put(_Frame(link, commands, arrived_ns, room))
        return True

    def end_link(self, link: Link) -> None:
        """Close a link's sessions once the pass in flight has ended."""

        def end() -> None:
            self._desk.end_link(link)
            if link in self._finishing:
                self._finishing.remove(link)

        self._put(end)

    def finish_link(self, link: Link) -> None:
        """The peer sends no more: end the link once everything it asked for is answered."""
        self._put(lambda: self._finishing.append(link))

    def drain(self) -> Future[None]:
        """Refuse new sessions; the future is done when no session is left."""
        done: Future[None] = Future()
        self._desk.draining = True  # at once: the next frame to any peer says so
        self._put(lambda: self._empty_waiters.append(done))
        return done

    @property
    def num_waiting(self) -> int:
        """Commands that arrived and are not in the pass that runs."""
        unread = self._num_submitted - self._desk.num_answered
        return max(0, unread) + self._scheduler.num_waiting

    def load(self) -> session_pb2.ServiceLoad:
        """What rides on every result frame."""
        return session_pb2.ServiceLoad(
            num_sessions=len(self._table),
            num_waiting=self.num_waiting,
            free_pages=self._pool.num_free,
            total_pages=self._pool.num_pages,
            draining=self._desk.draining,
        )

    # ------------------------------------------------------------ worker

    def _accept(self, frame: _Frame) -> None:
        link, commands = frame.link, frame.commands
        with self._submit_lock:
            self._num_unread[link] -= len(commands)
            if not self._num_unread[link]:
                del self._num_unread[link]
        for index, command in enumerate(commands):
            if index >= frame.room and command.WhichOneof("command") != "close":
                self._desk.num_answered += 1
                error = TooBusy("too many commands wait for the device", retry_after_s=0.1)
                self._desk.refuse(link, command, error)
            else:
                self._desk.accept(Request(link, command, frame.arrived_ns))

    def _warm_up(self) -> bool:
        started_ns = self._observers.clock_ns()
        try:
            self._executor.warm_up(self._options.warm_up_lens)
        except Exception as error:  # noqa: BLE001 - handed to whoever called start
            self._warm.set_exception(error)
            return False
        self._observers.metrics.warm_up.set((self._observers.clock_ns() - started_ns) * 1e-9)
        self._warm.set_result(None)
        return True

    def _serve_on_thread(self) -> None:
        # Warmed up on the thread that serves: thread pools of a CPU belong to it.
        if self._warm_up():
            block_on(self._serving())

    def _serving(self) -> Waiting[None]:
        """Serve until told to stop. An error that ends it is told to `on_death`."""
        can_run = False
        try:
            while True:
                if not (can_run or self._held):
                    yield from self._await_item()
                if not self._read_inbox():
                    return
                ran = yield from self._turn()
                posted = self._flush()
                if posted:  # what a pass gave is on its way before the next one is begun
                    yield Leaving(posted)
                can_run = self._can_run(after=ran)
        except GeneratorExit:  # nobody drives it any more
            raise
        except BaseException:
            logger.critical("the engine's worker died", exc_info=True)
            self.on_death()

    def _can_run(self, *, after: bool) -> bool:
        """Whether there is work that nothing has to arrive for. after: whether a pass ran just now;
        where none did, what is left waits for pages."""
        return (after and self._scheduler.has_work) or self._ahead.is_wanted

    def _await_item(self) -> Waiting[None]:
        """Wait until something arrives, or idle sessions are to be looked for."""
        item = yield Arrival(self._inbox, EXPIRY_PERIOD_S)
        if item is queue.Empty:  # nothing came for a whole period
            yield Apart(self._executor.use_idle)
        else:
            self._held.append(item)

    def _turn(self) -> Waiting[bool]:
        """Everything between what arrived and what is sent. True where a pass ran.

        All that a pass gave leaves before the next one is begun: when an answer comes must not tell
        whether another pass was wanted, which depends on what was drawn.
        """
        self._expire()
        yield from self._complete(self._desk_completed())
        step = self._compose()
        runs_ahead = self._ahead.is_wanted and not step.segments
        if step.segments:
            yield from self._run(step)
        elif runs_ahead:
            yield from self._work_ahead()
        yield from self._complete(self._desk_completed())
        return bool(step.segments) or runs_ahead  # in either case commands may have come meanwhile

    def _read_inbox(self) -> bool:
        """Perform everything that arrived. False when told to stop."""
        while True:
            if self._held:
                item = self._held.popleft()
            else:
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    return True
            if item is None:
                return False
            if isinstance(item, _Frame):
                self._accept(item)
            else:
                item()

    def _nothing_waits(self) -> bool:
        """Whether the sessions in the pass are all there is: nobody else wants the next one."""
        return not self._held and self._inbox.empty() and not self._scheduler.has_work

    def _read_early(self) -> None:
        """While the device works, take commands that leave the sessions in the pass alone.

        Openings, closings and ends of links free pages, so they wait for the pass, and with them
        everything that came later.
        """
        kind = self._role.wire.kind
        while not self._held:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Frame) and all(
                command.WhichOneof("command") == kind for command in item.commands
            ):
                self._accept(item)
            else:
                self._held.append(item)

    def _expire(self) -> None:
        now = self._observers.clock_ns()
        if now >= self._next_expiry_ns:
            self._next_expiry_ns = now + int(EXPIRY_PERIOD_S * 1e9)
            self._desk.expire(int(self._options.session_idle_s * 1e9))

    def _compose(self) -> Step:
        before = self._scheduler.num_preemptions
        step = self._scheduler.compose()
        if self._scheduler.num_preemptions > before:
            self._observers.metrics.preemptions.inc(self._scheduler.num_preemptions - before)
        return step

    def _run(self, step: Step) -> Waiting[None]:
        tasks = [segment.task for segment in step.segments]
        try:
            outcome = yield from self._executor.perform(step, self._read_early, self._nothing_waits)
        except Exception as error:
            logger.exception("a forward pass failed")
            if isinstance(error, torch.AcceleratorError):
                raise  # the device's context is lost: no later pass can succeed
            for task in tasks:
                self._fail(task, InternalError(f"the forward pass failed: {type(error).__name__}"))
            return
        for task in (*outcome.unfinished, *outcome.left):
            self._scheduler.add(task)
        left = set(map(id, outcome.left))
        spans = [task.span for task in tasks if id(task) not in left]
        self._observe(outcome, spans)  # before answers end the spans: ended, they take no links
        if outcome.finished:
            yield from self._advance(outcome.finished, outcome.logits)

    def _work_ahead(self) -> Waiting[None]:
        """Nothing else waits: compute what may be asked next, and tell whoever would ask."""
        if not self._ahead.drop_stale():
            return
        yield Aside(PAUSE_S)
        if not self._inbox.empty():
            return
        try:
            found = yield from self._ahead.run(self._read_early, self._is_wanted_elsewhere)
        except torch.AcceleratorError:
            raise  # as in `_run`
        except Exception:
            logger.exception("work ahead failed")
            return
        if found is not None:
            self._desk.tell(*found)

    def _is_wanted_elsewhere(self) -> bool:
        """Whether there are commands that the device should rather serve."""
        return bool(self._held) or not self._inbox.empty() or self._scheduler.has_work

    def _desk_completed(self) -> list[Finished]:
        completed, self._desk.completed = self._desk.completed, []
        return [Finished(task, 0, 0) for task in completed]

    def _complete(self, finished: list[Finished]) -> Waiting[None]:
        """Answer commands that needed no pass; answering one may start the session's next."""
        while finished:
            yield from self._advance(finished, torch.empty(0, self.limits.vocab_size))
            finished = self._desk_completed()

    def _advance(self, finished: list[Finished], logits: torch.Tensor) -> Waiting[None]:
        decided = [entry for entry in finished if entry.decided is not None]
        self._answer(decided, [entry.decided[0] for entry in decided if entry.decided])
        open_ = [entry for entry in finished if entry.decided is None]
        if open_:
            self._answer(open_, (yield from self._decided(open_, logits)))

    def _decided(self, finished: list[Finished], logits: torch.Tensor) -> Waiting[list[Any]]:
        if not len(logits):
            return self._decide(finished, logits)
        # Rows of the whole vocabulary, shaped one by one: milliseconds each.
        outcomes: list[Any] = yield Apart(lambda: self._decide(finished, logits))
        return outcomes

    def _decide(self, finished: list[Finished], logits: torch.Tensor) -> list[Any]:
        """The role's outcome for each."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # rows are small: waking a second thread costs more than it saves
        try:
            return self._role.advance(finished, logits)
        except Exception as error:
            logger.exception("deciding a pass failed")
            return [InternalError(f"unexpected {type(error).__name__}")] * len(finished)
        finally:
            torch.set_num_threads(num_threads)

    def _answer(self, finished: list[Finished], outcomes: list[Any]) -> None:
        for entry, outcome in zip(finished, outcomes, strict=True):
            if outcome is None:
                self._scheduler.add(entry.task)
            elif isinstance(outcome, SpecmeshError):
                self._fail(entry.task, outcome)
            else:
                if entry.task.is_tainted:
                    self._keep_confirmed(entry.task)
                self._desk.commit(entry.task, outcome)
                if not isinstance(outcome, Part) and entry.task.fault is None:
                    self._ahead.consider(entry.task, outcome)

    def _keep_confirmed(self, task: Task) -> None:
        """Drop what a command wrote behind the confirmed prefix. That stays in the prefix cache:
        the same base may be asked for again with the same noise, and what comes when must not
        follow from what was drawn behind it."""
        self._scheduler.publish(task.session)
        self._scheduler.wipe(task.session)

    def _fail(self, task: Task, error: SpecmeshError) -> None:
        answer = isolated(self._role.salvage, task)
        if answer is None or isinstance(answer, SpecmeshError):
            if task.is_tainted or isinstance(error, NumericFault):
                self._scheduler.wipe(task.session)
            self._desk.fail(task, error)
            return
        task.fault = task.fault or error
        self._keep_confirmed(task)  # a pass that failed may have written anything
        self._desk.commit(task, answer)

    def _flush(self) -> list[Link]:
        """Send what is to be sent; returns the links that got any of it."""
        outbound = self._desk.take_outbound()
        for link, results in outbound.items():
            link.post(results)
        for link in [link for link in self._finishing if not self._table.awaits_answer(link)]:
            self._finishing.remove(link)
            link.post_end()
        if self._empty_waiters and not len(self._table):
            for waiter in self._empty_waiters:
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(None)
            self._empty_waiters.clear()
        return list(outbound)

    def _observe(self, outcome: StepOutcome, spans: list[Any]) -> None:
        elapsed_us = (outcome.end_ns - outcome.start_ns) // 1000
        metrics = self._observers.metrics
        metrics.observe_forward(elapsed_us, len(spans), outcome.num_tokens)
        offset = self._observers.unix_offset_ns
        self._observers.telemetry.record_batch(
            self._role.wire.forward_span,
            spans,
            outcome.start_ns + offset,
            outcome.end_ns + offset,
            {"specmesh.batch.size": len(spans), "specmesh.batch.rows": outcome.num_tokens},
        )


def system_clocks() -> tuple[Callable[[], int], int]:
    """The monotonic clock in nanoseconds and what to add to it for Unix time."""
    return time.monotonic_ns, time.time_ns() - time.monotonic_ns()
