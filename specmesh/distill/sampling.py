"""Sampling text from the target, many rows at a time, with the hidden states that wrote it.

Rows advance together, one token a step. Where an answer ends, the row goes on with the next prompt
and sees nothing of the conversation before. All bookkeeping is on the device, so a step has no
host work and is replayed as a CUDA graph where there is a GPU. The target's final hidden state of
every token is kept: training needs no second pass of the target. Must not know losses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specmesh.distill.attention import StepCache
from specmesh.distill.transformer import Transformer

_COLUMN_BUCKET = 64  # keys that a step reads are rounded up to this: one captured graph each
_LEAST_NOISE = 1e-20


class Turn(IntEnum):
    """Who speaks at a column, that is, what its hidden state predicts."""

    PROMPT = 0  # a token that was given
    ANSWER = 1
    USER = 2  # a request that the target wrote itself
    FREE = 3  # text without a structure that is looked at


@dataclass(frozen=True, slots=True)
class Opening:
    """What a conversation starts with: token ids, whose turn follows, and its temperatures."""

    token_ids: list[int]
    turn: Turn
    user_temperature: float = 1.0
    answer_temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Sampled rows. Column t holds the token fed there and what came after it.

    tokens, next_tokens: int32 [rows, length]. starts: bool, first token of a conversation. turns:
    uint8, the `Turn` of the token after the column. hidden: the target's final hidden states
    [rows, length, hidden].
    """

    tokens: Tensor
    next_tokens: Tensor
    starts: Tensor
    turns: Tensor
    hidden: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Rows:
        """Room for shape = (rows, length, hidden)."""
        return cls(
            tokens=torch.zeros(shape[:2], dtype=torch.int32, device=device),
            next_tokens=torch.zeros(shape[:2], dtype=torch.int32, device=device),
            starts=torch.zeros(shape[:2], dtype=torch.bool, device=device),
            turns=torch.zeros(shape[:2], dtype=torch.uint8, device=device),
            hidden=torch.zeros(shape, dtype=dtype, device=device),
        )

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self.tokens.shape[0]

    def fields(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the class."""
        return self.tokens, self.next_tokens, self.starts, self.turns, self.hidden

    def take(self, index: Tensor | slice) -> Rows:
        """Copy (or for a slice: view) some rows."""
        return Rows(*(field[index] for field in self.fields()))


@dataclass(frozen=True, slots=True)
class Endings:
    """How turns end. eos_ids end an answer. user_suffix: what the template puts between the end of
    the user's turn and the answer; its first id is what ends the turn. A request that the target
    writes itself is cut at max_user_len tokens of its conversation."""

    eos_ids: tuple[int, ...]
    user_suffix: list[int]
    max_user_len: int = 192


@dataclass(slots=True)
class _State:
    """Per-row state, each tensor [rows] on the device; `step` [1] is the column to be written."""

    step: Tensor
    token: Tensor
    opening: Tensor
    offset: Tensor
    turn: Tensor
    row_start: Tensor
    cursor: Tensor


class Sampler:
    """Draws rows of `length` tokens from a target, `num_rows` at a time. One thread at a time."""

    def __init__(
        self,
        target: Transformer,
        endings: Endings,
        *,
        num_rows: int,
        length: int,
        max_opening_len: int,
    ) -> None:
        spec, dtype, device = target.spec, target.embedding.dtype, target.embedding.device
        self._target, self._endings = target, endings
        self.num_rows, self.length = num_rows, length
        self._max_opening_len = max_opening_len
        self._uses_graphs = device.type == "cuda"
        self._cache = StepCache(
            (spec.num_layers, num_rows, spec.num_kv_heads, length, spec.head_dim), dtype, device
        )
        self._rows = Rows.empty((num_rows, length, spec.hidden_size), dtype, device)
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._state = _State(
            step=torch.zeros(1, dtype=torch.int64, device=device),
            token=zeros.clone(),
            opening=zeros.clone(),
            offset=zeros.clone(),
            turn=zeros.clone(),
            row_start=zeros.clone(),
            cursor=torch.zeros((), dtype=torch.int64, device=device),
        )
        self._noise = torch.ones(num_rows, len(target.head), device=device)
        self._eos = torch.tensor(endings.eos_ids, dtype=torch.int64, device=device)
        # Openings of a wave: the suffix of the user's turn first, then one a conversation.
        self._max_openings = 1 + num_rows * max(2, length // 8)
        self._openings = torch.zeros(
            self._max_openings, max_opening_len, dtype=torch.int64, device=device
        )
        self._lengths, self._turns = (
            torch.zeros(self._max_openings, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._num_openings = torch.ones((), dtype=torch.int64, device=device)
        self._temperatures = torch.ones(self._max_openings, 4, device=device)
        # A conversation keeps its opening's temperatures when the suffix takes the opening's place.
        self._chosen = torch.ones(num_rows, 4, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def draw(
        self,
        openings: list[Opening],
        generator: torch.Generator,
        after_column: Callable[[], None] = lambda: None,
    ) -> Rows:
        """Sample one wave. Row i starts with openings[i]; where an answer ends, the row takes the
        next unused opening, and the list starts over when it is used up.

        generator, of the target's device, is advanced. after_column is called as each of the
        `length` columns is asked for. The result is overwritten by the next call. Raises ValueError
        for fewer openings than rows or one that is too long.
        """
        self._load(openings)
        for column in range(self.length):
            num_columns = min(-(-(column + 1) // _COLUMN_BUCKET) * _COLUMN_BUCKET, self.length)
            self._noise.exponential_(generator=generator)
            self._run(num_columns)
            after_column()
        return self._rows

    def _load(self, openings: list[Opening]) -> None:
        if len(openings) < self.num_rows:
            raise ValueError(f"{len(openings)} openings for {self.num_rows} rows")
        if max(len(opening.token_ids) for opening in openings) > self._max_opening_len:
            raise ValueError(f"an opening is longer than {self._max_opening_len} tokens")
        openings = [
            Opening(self._endings.user_suffix, Turn.ANSWER),
            *openings[: self._max_openings - 1],
        ]
        width = self._max_opening_len
        ids = [each.token_ids + [0] * (width - len(each.token_ids)) for each in openings]
        used = len(openings)
        device = self._openings.device
        self._openings[:used] = torch.tensor(ids, device=device)
        self._lengths[:used] = torch.tensor([len(o.token_ids) for o in openings], device=device)
        self._turns[:used] = torch.tensor([int(o.turn) for o in openings], device=device)
        by_turn = [
            [1.0, o.answer_temperature, o.user_temperature, o.user_temperature] for o in openings
        ]
        self._temperatures[:used] = torch.tensor(by_turn, device=device)
        self._num_openings.fill_(used)
        state = self._state
        state.step.zero_()
        state.row_start.zero_()
        state.opening.copy_(torch.arange(1, self.num_rows + 1, device=device))
        state.offset.fill_(1)
        state.cursor.fill_(self.num_rows + 1)
        state.token.copy_(self._openings[:, 0][state.opening])
        state.turn.copy_(self._turns[state.opening])
        self._chosen.copy_(self._temperatures[state.opening])

    def _run(self, num_columns: int) -> None:
        if not self._uses_graphs:
            self._step(num_columns)
            return
        graph = self._graphs.get(num_columns)
        if graph is None:
            self._step(num_columns)  # a step like any other, which also warms the libraries up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self._step(num_columns)
            self._graphs[num_columns] = graph
            return
        graph.replay()

    def _step(self, num_columns: int) -> None:
        """Feed every row's token at column `step`, draw the next one, record both."""
        state, rows = self._state, self._rows
        attend = self._cache.attend(state.step, state.row_start, num_columns)
        with _decode_attention(self._uses_graphs):
            hidden = self._target(state.token, state.step - state.row_start, attend)
        temperature = self._chosen.gather(1, state.turn[:, None])
        scores = self._target.logits(hidden).float().div_(temperature)
        sampled = scores.sub_(self._noise.clamp_(min=_LEAST_NOISE).log_()).argmax(1)
        rows.tokens.index_copy_(1, state.step, state.token[:, None].int())
        rows.starts.index_copy_(1, state.step, (state.step == state.row_start)[:, None])
        rows.hidden.index_copy_(1, state.step, hidden[:, None].to(rows.hidden.dtype))
        is_given = state.offset < self._lengths[state.opening]
        speaker = state.turn.masked_fill(is_given, int(Turn.PROMPT))
        rows.turns.index_copy_(1, state.step, speaker[:, None].to(torch.uint8))
        self._advance(sampled, is_given)

    def _advance(self, sampled: Tensor, is_given: Tensor) -> None:
        """Choose the next token of every row and whose turn it is."""
        state = self._state
        given = self._openings[state.opening, state.offset.clamp(max=self._max_opening_len - 1)]
        turn_end = self._endings.user_suffix[0]
        writes_request = ~is_given & (state.turn == int(Turn.USER))
        is_long = state.step + 1 - state.row_start >= self._endings.max_user_len
        request_ends = writes_request & ((sampled == turn_end) | is_long)
        is_eos = (sampled[:, None] == self._eos).any(1)
        answer_ends = ~is_given & (state.turn == int(Turn.ANSWER)) & is_eos
        token = torch.where(is_given, given, sampled.masked_fill(request_ends, turn_end))
        self._rows.next_tokens.index_copy_(1, state.step, token[:, None].int())
        fresh = state.cursor + answer_ends.long().cumsum(0) - 1
        fresh = 1 + (fresh - 1) % (self._num_openings - 1)
        opening = torch.where(answer_ends, fresh, state.opening.masked_fill(request_ends, 0))
        restarts = answer_ends | request_ends
        state.cursor.add_(answer_ends.sum())
        state.offset.copy_((state.offset + is_given.long()).masked_fill(restarts, 1))
        turn = state.turn.masked_fill(request_ends, int(Turn.ANSWER))
        state.turn.copy_(torch.where(answer_ends, self._turns[opening], turn))
        chosen = torch.where(answer_ends[:, None], self._temperatures[opening], self._chosen)
        self._chosen.copy_(chosen)
        state.row_start.copy_(torch.where(answer_ends, state.step + 1, state.row_start))
        state.token.copy_(torch.where(answer_ends, self._openings[:, 0][opening], token))
        state.opening.copy_(opening)
        state.step.add_(1)


def _decode_attention(on_gpu: bool) -> AbstractContextManager[object]:
    """On a GPU the one backend that takes a mask and fits a captured graph."""
    if not on_gpu:
        return nullcontext()
    manager: Callable[..., AbstractContextManager[object]] = sdpa_kernel
    return manager(SDPBackend.EFFICIENT_ATTENTION)
