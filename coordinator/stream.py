"""The output of one request on its way to the caller: a bounded buffer between samples and reader.

Owns the messages of the response stream and the rule for slow readers: while the buffer is full
the samples pause (their next round waits), and a reader that takes nothing for `slow_reader_s`
loses the request, so that it cannot hold K/V or a place forever, whatever is left for it to take.
Must not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.commands import Failed
from coordinator.messages import Deliver, Fail, Finish, FinishReason, Stats
from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.errors import BY_REASON, Cancelled, InternalError, SpecmeshError

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sample ended: `finish` or `error`."""

    stats: Stats
    finish: Finish | None = None
    error: SpecmeshError | None = None


def error_of(failure: Failed) -> SpecmeshError:
    """The error class that a failure names."""
    cls = BY_REASON.get(failure.reason, InternalError)
    return cls(failure.message, field=failure.field, retry_after_s=failure.retry_after_s)


class OutputStream:
    """Messages of one request. Event-loop only; one reader."""

    def __init__(
        self,
        num_samples: int,
        max_unread: int,
        slow_reader_s: float,
        stop_text: Callable[[int], str],
    ) -> None:
        """max_unread: messages that may wait before samples pause. stop_text: text of a token."""
        self._loop = asyncio.get_running_loop()
        self._num_samples = num_samples
        self._max_unread = max_unread
        self._slow_reader_s = slow_reader_s
        self._stop_text = stop_text
        self._messages: deque[pb.GenerateResponse] = deque()
        self._wake = asyncio.Event()
        self._error: SpecmeshError | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._left_at: float | None = None  # when the reader last left with a message
        self._resume: Callable[[], None] = lambda: None
        self._abandon: Callable[[SpecmeshError], None] = lambda error: None
        self.ended: dict[int, Ended] = {}
        self.first_chunk_s: float | None = None

    def connect(self, resume: Callable[[], None], abandon: Callable[[SpecmeshError], None]) -> None:
        """resume: paused samples may go on. abandon: the reader has lost its request.

        From now on the reader is expected: until it comes for a message, it takes nothing.
        """
        self._resume = resume
        self._abandon = abandon
        self._left_at = self._loop.time()
        self._watch(self._slow_reader_s)

    @property
    def is_full(self) -> bool:
        """Whether samples must pause."""
        return len(self._messages) >= self._max_unread

    def sink(self, index: int) -> SampleSink:
        """Where sample `index` delivers."""
        return SampleSink(self, index)

    def put(self, message: pb.GenerateResponse) -> None:
        """Queue a message."""
        self._messages.append(message)
        self._wake.set()

    def chunk(self, index: int, chunk: Deliver) -> None:
        """Queue confirmed tokens of a sample."""
        if self.first_chunk_s is None:
            self.first_chunk_s = self._loop.time()
        self.put(
            pb.GenerateResponse(
                chunk=pb.Chunk(
                    index=index,
                    token_ids=chunk.tokens,
                    text=chunk.text,
                    logprobs=chunk.logprobs,
                    round=chunk.round_index,
                )
            )
        )

    def finish(self, index: int, end: Finish) -> None:
        """Queue a sample's last message."""
        self.ended[index] = Ended(end.stats, finish=end)
        matched = end.matched_stop
        if end.matched_stop_token_id is not None:
            matched = self._stop_text(end.matched_stop_token_id)
        finished = pb.Finished(
            index=index,
            reason=_REASONS[end.reason],
            matched_stop=matched,
            matched_stop_token_id=end.matched_stop_token_id,
            usage=_usage(end.stats),
            speculation=_speculation(end.stats),
        )
        self.put(pb.GenerateResponse(finished=finished))

    def fail(self, index: int, end: Fail) -> None:
        """A sample failed: the request does, after what was delivered before."""
        error = error_of(end.failure)
        self.ended[index] = Ended(end.stats, error=error)
        self._error = self._error or error
        self._wake.set()

    async def next(self) -> pb.GenerateResponse | None:
        """The next message; None after the last. Raises the error that ended the request.

        The reader takes its time from here on until it calls again: a message that its transport
        does not take keeps it away.
        """
        self._left_at = None
        while not self._messages:
            if self._error is not None:
                raise self._error
            if len(self.ended) == self._num_samples:
                return None
            self._wake.clear()
            await self._wake.wait()
        message = self._messages.popleft()
        self._left_at = self._loop.time()
        if len(self._messages) == self._max_unread - 1:
            self._resume()
        return message

    def close(self) -> None:
        """The reader is gone."""
        if self._slow_timer is not None:
            self._slow_timer.cancel()

    def _watch(self, wait_s: float) -> None:
        self._slow_timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        """Whether the reader has been away for too long. One timer for all messages: it is set
        anew when it rings, not with each of them."""
        if self._left_at is None:  # it waits here
            self._watch(self._slow_reader_s)
            return
        left_s = self._left_at + self._slow_reader_s - self._loop.time()
        if left_s > 0:
            self._watch(left_s)
        else:
            self._too_slow()

    def _too_slow(self) -> None:
        self._messages.clear()
        self._error = Cancelled(
            f"nothing was read for {self._slow_reader_s:g} s; resume with the ids received"
        )
        self._wake.set()
        self._abandon(self._error)

    def __iter__(self) -> Iterator[Ended]:
        """How the samples ended, in order of their indices."""
        return (self.ended[index] for index in sorted(self.ended))


class SampleSink:
    """One sample's end of an `OutputStream`."""

    def __init__(self, stream: OutputStream, index: int) -> None:
        self._stream = stream
        self._index = index

    @property
    def is_full(self) -> bool:
        """Whether the sample must pause."""
        return self._stream.is_full

    def deliver(self, chunk: Deliver) -> None:
        """Take confirmed tokens."""
        self._stream.chunk(self._index, chunk)

    def finish(self, end: Finish) -> None:
        """Take the end."""
        self._stream.finish(self._index, end)

    def fail(self, end: Fail) -> None:
        """Take the failure."""
        self._stream.fail(self._index, end)


def _usage(stats: Stats) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        cached_tokens=stats.cached_tokens,
    )


def _speculation(stats: Stats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        num_rounds=stats.num_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted=stats.num_accepted,
        judged_per_position=stats.judged_per_position,
        accepted_per_position=stats.accepted_per_position,
        fallback_rounds=stats.fallback_rounds,
    )
