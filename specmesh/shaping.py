"""From sampling parameters to rows: one path that draft and target share, so that p and q agree.

Owns the meaning of a request's sampling parameters: their ranges (`validate`) and how they act on
logits (`TokenShaper`, over `kernels.reference`). A row is a pure function of logits and of the
tokens before its position, so penalties see the confirmed prefix plus the preceding candidates and
nothing else (exactness rules 9 and 11). Knows no sessions, transports or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from kernels import reference
from protos.specmesh.v1 import session_pb2
from specmesh.errors import InvalidRequest, NumericFault

MIN_TEMPERATURE = 1e-3  # below it, float32 logits divided by it lose their order to overflow
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0  # presence and frequency, either sign
REPETITION_RANGE = (0.1, 10.0)
MAX_LOGIT_BIAS = 100.0
MAX_LOGPROBS = 20


def validate(params: session_pb2.SamplingParams, vocab_size: int) -> None:
    """Check every sampling parameter of a request; the names in errors are the public fields'.

    Raises InvalidRequest with `field` set. NaN and infinities are out of every range.
    """
    if params.temperature != 0.0:
        _in_range("temperature", params.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, "0 or ")
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest(f"must be in (0, 1], got {params.top_p:g}", field="top_p")
    _in_range("min_p", params.min_p, 0.0, 1.0)
    _in_range("repetition_penalty", params.repetition_penalty, *REPETITION_RANGE)
    _in_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _in_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    for entry in params.logit_bias:
        _in_vocabulary("logit_bias", entry.token_id, vocab_size)
        _in_range("logit_bias", entry.bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if len({entry.token_id for entry in params.logit_bias}) != len(params.logit_bias):
        raise InvalidRequest("a token id has two biases", field="logit_bias")
    for token_id in params.stop_token_ids:
        _in_vocabulary("stop_token_ids", token_id, vocab_size)
    if params.min_tokens and len(set(params.stop_token_ids)) >= vocab_size:
        raise InvalidRequest("every token id is suppressed by min_tokens", field="stop_token_ids")
    if params.HasField("num_logprobs") and params.num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(f"must be at most {MAX_LOGPROBS}", field="logprobs")


def _in_range(field: str, value: float, low: float, high: float, other: str = "") -> None:
    # Proto floats are float32, so 0.1 arrives as 0.10000000149: compare at that precision.
    if not float(torch.tensor(low)) <= value <= float(torch.tensor(high)):
        raise InvalidRequest(f"must be {other}in [{low:g}, {high:g}], got {value:g}", field=field)


def _in_vocabulary(field: str, token_id: int, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise InvalidRequest(
            f"token id {token_id} is outside a vocabulary of {vocab_size}", field=field
        )


class TokenShaper:
    """Shapes the logits of one session into rows, as its sampling parameters say.

    Built by both services from the same parameters. Keeps counts of the prefix it saw last, checked
    against the prefix at every call, so results depend on the arguments only. Not thread-safe.
    """

    def __init__(
        self, params: session_pb2.SamplingParams, vocab_size: int, prompt_len: int
    ) -> None:
        """vocab_size: real ids, without padding. prompt_len: tokens [0, prompt_len) are the prompt.

        Raises InvalidRequest when a parameter is out of range.
        """
        validate(params, vocab_size)
        self.is_greedy = params.temperature == 0.0
        self.stop_ids = frozenset(params.stop_token_ids)
        self._vocab_size = vocab_size
        self._prompt_len = prompt_len
        self._min_tokens = params.min_tokens
        self._suppressed = tuple(sorted(self.stop_ids))
        self._shaping = reference.Shaping(
            temperature=params.temperature,
            # As many as there are takes none away, and passes what a device counts to.
            top_k=params.top_k if params.top_k < vocab_size else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            self._bias = (
                torch.tensor([entry.token_id for entry in params.logit_bias]),
                torch.tensor([entry.bias for entry in params.logit_bias]),
            )
        self._has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._counted: list[int] = []
        self._prompt_ids = torch.empty(0, dtype=torch.int64)
        self._output_counts: Counter[int] = Counter()

    @property
    def filters(self) -> reference.Shaping:
        """Temperature, top-k, top-p and min-p (and the penalties) as the kernels take them."""
        return self._shaping

    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p take ids away; never at temperature 0."""
        shaping = self._shaping
        return not self.is_greedy and (
            shaping.top_k > 0 or shaping.top_p < 1.0 or shaping.min_p > 0.0
        )

    def depends_on_ids(self, output_len: int) -> bool:
        """Whether a row after output_len tokens of output needs more than logits and filters:
        a bias, penalties, or stop ids suppressed before min_tokens."""
        suppresses = bool(self.stop_ids) and output_len < self._min_tokens
        return self._has_penalties or self._bias is not None or suppresses

    @property
    def prompt_len(self) -> int:
        """Tokens that count as the prompt."""
        return self._prompt_len

    def rows(
        self, logits: Tensor, prefix: Sequence[int], candidates: Sequence[int]
    ) -> Sequence[Tensor]:
        """Rows for the positions from len(prefix) on, each shaped when it is first read.

        logits: float [num_rows, width], width >= vocab_size, row i after prefix and candidates[:i].
        Row i is float32 [vocab_size] and sees prefix + candidates[:i]. Later changes of `prefix` do
        not matter. Reading a row raises NumericFault when its logits hold NaN or +inf, or nothing
        finite: rows that are never judged are never counted (exactness rule 12).
        """
        return ShapedRows(self, logits, self._count(prefix), len(prefix), candidates)

    def row(self, logits: Tensor, prefix: Sequence[int], candidates: Sequence[int] = ()) -> Tensor:
        """The row (float32 [vocab_size]) of logits [width] that follow prefix + candidates.

        Raises NumericFault as in `rows`.
        """
        counts = self._count(prefix)
        return self._shape(logits, counts, len(prefix), candidates)

    def _count(self, prefix: Sequence[int]) -> Counter[int]:
        """Occurrences of each output token of the prefix; a shared object, not to be changed."""
        if not self._has_penalties:
            return self._output_counts
        known = len(self._counted)
        if list(prefix[:known]) != self._counted or known < self._prompt_len:
            known = min(self._prompt_len, len(prefix))
            self._counted = list(prefix[:known])
            self._prompt_ids = torch.tensor(sorted(set(self._counted)), dtype=torch.int64)
            self._output_counts = Counter()
        if len(prefix) > known:
            # A new object: rows handed out before keep the counts they were given.
            self._output_counts = self._output_counts + Counter(prefix[known:])
            self._counted.extend(prefix[known:])
        return self._output_counts

    def _shape(
        self, logits: Tensor, counts: Counter[int], prefix_len: int, candidates: Sequence[int]
    ) -> Tensor:
        scores = logits if logits.numel() == self._vocab_size else logits[: self._vocab_size]
        if scores.dtype is not torch.float32:
            scores = scores.float()
        assert scores.numel() == self._vocab_size, (tuple(logits.shape), self._vocab_size)
        if self._bias is not None or self._has_penalties:
            if candidates and self._has_penalties:
                counts = counts + Counter(candidates)
            scores = reference.penalize(
                scores,
                self._shaping,
                bias=self._bias,
                prompt_ids=self._prompt_ids,
                output_ids=torch.tensor(list(counts.keys()), dtype=torch.int64),
                output_counts=torch.tensor(list(counts.values()), dtype=torch.int64),
            )
        output_len = prefix_len + len(candidates) - self._prompt_len
        suppressed = self._suppressed if output_len < self._min_tokens else ()
        try:
            return reference.shape(scores, self._shaping, self._vocab_size, suppressed)
        except FloatingPointError as fault:
            position = prefix_len + len(candidates)
            raise NumericFault(f"row of position {position}: {fault}") from fault


class ShapedRows(Sequence[Tensor]):
    """Rows of one forward pass, shaped on access and kept. Made by `TokenShaper.rows`."""

    def __init__(
        self,
        shaper: TokenShaper,
        logits: Tensor,
        counts: Counter[int],
        prefix_len: int,
        candidates: Sequence[int],
    ) -> None:
        """Takes logits [num_rows, width]; needs at least num_rows - 1 candidates."""
        assert logits.ndim == 2, tuple(logits.shape)
        assert logits.shape[0] <= len(candidates) + 1, (tuple(logits.shape), len(candidates))
        self._shaper = shaper
        self._logits = logits
        self._counts = counts
        self._prefix_len = prefix_len
        self._candidates = tuple(candidates)
        self._shaped: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._logits.shape[0]

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row_index = index + len(self) if index < 0 else index
        if not 0 <= row_index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if row_index not in self._shaped:
            self._shaped[row_index] = self._shaper._shape(
                self._logits[row_index],
                self._counts,
                self._prefix_len,
                self._candidates[:row_index],
            )
        return self._shaped[row_index]
