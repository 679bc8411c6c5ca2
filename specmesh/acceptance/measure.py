"""Measuring a pair: text of the target at each temperature, judged by both models.

The target answers prompts (and, where asked, writes text without one); the draft reads what it
wrote. Must not know tables or plots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmesh.acceptance.rows import Columns, judge, run_lengths, survival
from specmesh.distill.attention import forward_rows
from specmesh.distill.prompts import answer_openings, chat_frame, free_opening
from specmesh.distill.sampling import Opening, Rows, Sampler, Turn
from specmesh.distill.student import load_student, plan_from_model
from specmesh.distill.transformer import Transformer, load_transformer
from specmesh.engine.families import read_spec
from specmesh.engine.model_pair import check_pair
from specmesh.errors import ConfigError
from specmesh.planning import RoundTimes, expected_tokens, speculative_speedup
from specmesh.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

NUM_POSITIONS = 8
_DEPTHS = (16, 64, 128)  # answers' columns up to these counts, and all later ones, are apart
_ROWS_A_PASS, _COLUMNS_A_PASS = 8, 256
_SEED = 20


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure. num_tokens: of each row, prompt included. free_rows: rows of text without a
    prompt, 0 for none."""

    target: Path
    draft: Path
    prompts: Sequence[str]
    temperatures: tuple[float, ...] = (1.0, 0.7)
    num_tokens: int = 256
    free_rows: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding of the draft's rows: acceptance when drawn from it, and mean bytes of a row."""

    acceptance: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Table:
    """Figures of one kind of text at one temperature.

    acceptance and its standard error (by conversation) over num_tokens tokens; agreement: share of
    columns with the same argmax; survival[i]: chance that candidates 1..i+1 of a round are all
    accepted; rates[i]: of candidate i+1 given those before; tokens_per_round[k]: E[N] of k
    candidates; by_depth: acceptance by position in the answer.
    """

    text: str
    temperature: float
    acceptance: float
    standard_error: float
    agreement: float
    num_tokens: int
    survival: list[float]
    rates: list[float]
    tokens_per_round: list[float]
    by_depth: dict[str, float]
    encodings: dict[str, Encoding]


@dataclass(frozen=True, slots=True)
class Measurement:
    """All tables of a pair. cost_ratio: weights that a draft step reads over those of a target
    step; speedups[k]: what `specmesh plan` expects of k candidates on a device bound by memory
    (first table's rates, verification as long as a plain step, no network)."""

    target: str
    draft: str
    tables: list[Table]
    cost_ratio: float
    speedups: list[float]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def measure(request: Request, report: Callable[[float], None] = lambda _: None) -> Measurement:
    """Measure a pair. Raises ConfigError and ModelMismatch for folders that do not fit.

    report is given the share that is done, up to 1, after each column drawn and each rows judged.
    """
    device = torch.device(request.device)
    tokenizer = load_tokenizer(request.target)
    spec = read_spec(request.target, tokenizer.vocab_size)
    _check(request, spec.max_context_len)
    target = load_transformer(request.target, spec, dtype=request.dtype, device=device)
    draft = _load_draft(request, target, tokenizer)
    tables = []
    texts = _texts(request, tokenizer)
    num_rows = len(request.temperatures) * sum(len(openings) for openings in texts.values())
    work = _Work(2 * num_rows * request.num_tokens, report)  # each token is drawn and judged
    for text, openings in texts.items():
        sampler = Sampler(
            target,
            chat_frame(tokenizer).endings,
            num_rows=len(openings),
            length=request.num_tokens,
            max_opening_len=request.num_tokens - 1,
        )
        for temperature in request.temperatures:
            generator = torch.Generator(device).manual_seed(_SEED)
            rows = sampler.draw(
                [_at(o, temperature) for o in openings], generator, partial(work.add, len(openings))
            )
            tables.append(_judge_rows(text, temperature, rows, (target, draft), work))
    ratio = _num_weights(draft) / _num_weights(target)
    return Measurement(
        request.target.name, request.draft.name, tables, ratio, _speedups(tables[0].rates, ratio)
    )


class _Work:
    """How much of a measurement is done, in tokens drawn and tokens judged."""

    def __init__(self, total: int, report: Callable[[float], None]) -> None:
        self._done, self._total, self._report = 0, total, report

    def add(self, count: int) -> None:
        self._done += count
        self._report(self._done / self._total)


def _check(request: Request, max_context_len: int) -> None:
    if not request.temperatures or any(not 0.05 <= t <= 10 for t in request.temperatures):
        raise ConfigError(
            f"{list(request.temperatures)}: expected numbers in [0.05, 10]", field="temperatures"
        )
    if not 16 <= request.num_tokens <= max_context_len:
        raise ConfigError(
            f"{request.num_tokens} is not in [16, {max_context_len}]", field="num_tokens"
        )
    if torch.device(request.device).type == "cuda" and request.num_tokens % 64:
        raise ConfigError(f"{request.num_tokens} is no multiple of 64", field="num_tokens")


def _load_draft(request: Request, target: Transformer, tokenizer: Tokenizer) -> Transformer:
    """A whole folder, or one of layers alone that shares the target's embedding."""
    if not (request.draft / TOKENIZER_FILE).is_file():
        plan = plan_from_model(request.draft, request.target, target.spec)
        model = load_student(plan, target, None).requires_grad_(False)
        return model.to(request.dtype)
    _, spec = check_pair(request.target, request.draft)
    return load_transformer(
        request.draft, spec, dtype=request.dtype, device=torch.device(request.device)
    )


def _texts(request: Request, tokenizer: Tokenizer) -> dict[str, list[Opening]]:
    texts: dict[str, list[Opening]] = {}
    if request.prompts:
        openings = answer_openings(tokenizer, request.prompts)
        fitting = [o for o in openings if len(o.token_ids) < request.num_tokens]
        if not fitting:
            raise ConfigError(
                f"no prompt leaves room for an answer within {request.num_tokens} tokens",
                field="num_tokens",
            )
        texts["answers"] = fitting
    if request.free_rows:
        opening = free_opening(tokenizer, chat_frame(tokenizer))
        texts["unprompted"] = [opening] * request.free_rows
    if not texts:
        raise ConfigError("neither prompts nor free rows to measure on", field="prompts")
    return texts


def _at(opening: Opening, temperature: float) -> Opening:
    return Opening(opening.token_ids, opening.turn, temperature, temperature)


# ---------------------------------------------------------------- judging


@torch.no_grad()
def _judge_rows(
    text: str, temperature: float, rows: Rows, pair: tuple[Transformer, Transformer], work: _Work
) -> Table:
    target, draft = pair
    turn = Turn.ANSWER if text == "answers" else Turn.FREE
    counted = rows.turns == int(turn)
    grids = {
        name: torch.zeros(counted.shape, device=counted.device) for name in ("acceptance", "kept")
    }
    sums: dict[str, float] = defaultdict(float)
    for begin in range(0, rows.num_rows, _ROWS_A_PASS):
        chosen = slice(begin, begin + _ROWS_A_PASS)
        part = rows.take(chosen)
        hidden = forward_rows(draft, part.tokens, part.starts, "torch", is_mixed=False)
        places = counted[chosen].nonzero()
        for some in places.split(_COLUMNS_A_PASS):  # type: ignore[no-untyped-call]
            where = (some[:, 0], some[:, 1])
            columns = judge(
                target.vocabulary_logits(part.hidden[where]),
                draft.vocabulary_logits(hidden[where]),
                part.next_tokens[where].long(),
                temperature,
            )
            grids["acceptance"][chosen][where] = columns.acceptance
            grids["kept"][chosen][where] = columns.kept
            _add(sums, columns)
        work.add(part.tokens.numel())
    return _table(text, temperature, rows, counted, grids, sums)


def _add(sums: dict[str, float], columns: Columns) -> None:
    sums["count"] += len(columns.agrees)
    sums["agrees"] += float(columns.agrees.sum())
    for name, (acceptance, num_bytes) in columns.encodings.items():
        sums[f"{name} acceptance"] += float(acceptance.double().sum())
        sums[f"{name} bytes"] += float(num_bytes.double().sum())


def _table(
    text: str,
    temperature: float,
    rows: Rows,
    counted: Tensor,
    grids: dict[str, Tensor],
    sums: dict[str, float],
) -> Table:
    count = max(1, int(sums["count"]))
    acceptance = grids["acceptance"].double()
    mean = float(acceptance[counted].sum()) / count
    left = run_lengths(counted, rows.starts)
    alive = survival(grids["acceptance"], grids["kept"], left, NUM_POSITIONS).tolist()
    rates = [
        chance / before if before else 0.0
        for chance, before in zip(alive, [1.0, *alive], strict=False)
    ]
    names = [key.removesuffix(" bytes") for key in sums if key.endswith(" bytes")]
    return Table(
        text=text,
        temperature=temperature,
        acceptance=mean,
        standard_error=_standard_error(acceptance, counted, rows.starts, mean),
        agreement=sums["agrees"] / count,
        num_tokens=count,
        survival=alive,
        rates=rates,
        tokens_per_round=[expected_tokens(rates[:k]) for k in range(NUM_POSITIONS + 1)],
        by_depth=_by_depth(acceptance, counted, left),
        encodings={
            name: Encoding(sums[f"{name} acceptance"] / count, sums[f"{name} bytes"] / count)
            for name in names
        },
    )


def _standard_error(acceptance: Tensor, counted: Tensor, starts: Tensor, mean: float) -> float:
    """Of a mean over tokens that come in conversations: they, not tokens, are independent."""
    conversation = starts.flatten().long().cumsum(0) - 1
    residual = ((acceptance - mean) * counted).flatten()
    sums = residual.new_zeros(int(conversation[-1]) + 1).index_add_(0, conversation, residual)
    return float(sums.square().sum().sqrt() / counted.sum().clamp(min=1))


def _by_depth(acceptance: Tensor, counted: Tensor, left: Tensor) -> dict[str, float]:
    """Mean acceptance by how far into the answer a column is."""
    depth = torch.zeros_like(left)
    for column in range(1, left.shape[1]):
        goes_on = counted[:, column] & counted[:, column - 1]
        goes_on &= left[:, column] == left[:, column - 1] - 1
        depth[:, column] = torch.where(goes_on, depth[:, column - 1] + 1, 0)
    found = {}
    for low, high in zip((0, *_DEPTHS), (*_DEPTHS, 1 << 30), strict=True):
        chosen = counted & (depth >= low) & (depth < high)
        if chosen.any():
            name = f"{low + 1}-{high}" if high < 1 << 30 else f"{low + 1}-"
            found[name] = float(acceptance[chosen].mean())
    return found


# ---------------------------------------------------------------- expectations


def _num_weights(model: Transformer) -> int:
    """Weights that one decoding step reads: layers and head; of the embedding it reads a row."""
    return sum(p.numel() for p in model.parameters()) + model.head.numel()


def _speedups(rates: list[float], ratio: float) -> list[float]:
    """Expected speed-up of k = 0, 1, .. candidates, times in units of a plain target step."""
    times = RoundTimes(decode=1.0, draft=ratio, verify=1.0)
    return [
        speculative_speedup(expected_tokens(rates[:k]), k, times) for k in range(len(rates) + 1)
    ]
