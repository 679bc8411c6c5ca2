"""`specmesh distill` from settings to a folder: loads, checks, trains, writes, describes.

Owns the order of a run. Must not know flags.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmesh.acceptance.files import write_measurement
from specmesh.acceptance.measure import Request, measure
from specmesh.distill import checkpoints
from specmesh.distill.attention import default_backend
from specmesh.distill.card import CARD_FILE, card
from specmesh.distill.evaluation import HeldOut, Score
from specmesh.distill.folder import write_folder, write_text
from specmesh.distill.processes import Processes, num_processes
from specmesh.distill.progress import say
from specmesh.distill.prompts import (
    PromptSource,
    answer_openings,
    chat_frame,
    free_opening,
    read_prompts,
)
from specmesh.distill.sampling import Opening, Sampler, Turn
from specmesh.distill.settings import Settings, check_space
from specmesh.distill.student import (
    Plan,
    load_student,
    most_frequent,
    num_bytes,
    plan_from_model,
    plan_from_target,
)
from specmesh.distill.trainer import CURVE_FILE, Report, Trainer
from specmesh.distill.transformer import Transformer, load_transformer
from specmesh.engine.families import ModelSpec, read_spec
from specmesh.engine.weights import fingerprint
from specmesh.errors import ConfigError, InvalidRequest, ModelMismatch
from specmesh.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

MEASURED_TOKENS, MEASURED_FREE_ROWS = 384, 64  # of the card's measurement, prompt included
_TRIED_OPENINGS = 256  # drawn before models load, so that a length too short for them is refused
_VOCABULARY_SEED, _HELD_OUT_SEED = 1 << 40, 1 << 41  # apart from the pools' and each other


@dataclass(frozen=True, slots=True)
class Result:
    """What a run made: its folder, last scores by name, and how far it came."""

    folder: Path
    scores: dict[str, Score]
    place: checkpoints.Place


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that is read before models are. measured: prompts of the card's measurement."""

    tokenizer: Tokenizer
    spec: ModelSpec
    plan: Plan
    given: list[str]
    held_out: list[str]
    measured: list[str]


def _target_folder(settings: Settings) -> Path:
    """The target's folder; a .gguf file is converted once. Raises ConfigError."""
    if settings.target.suffix != ".gguf":
        return settings.target
    from specmesh.engine.model_folder import resolve_model

    cache_dir = settings.cache_dir or Path.home() / ".cache" / "specmesh"
    return resolve_model(settings.target, cache_dir / "models", say)


def distill(settings: Settings, report: Report) -> Result | None:
    """Make a draft; None on every process but the first. Raises InvalidRequest for a bad setting,
    ConfigError and ModelMismatch.

    report is given one record for each event of the curve, of resuming and of the measurement.
    """
    settings.check(num_processes())
    checkpoints.check_folder(settings.out, resume=settings.resume)
    settings = replace(settings, target=_target_folder(settings))
    with Processes(torch.device(settings.device)) as processes:
        settings = replace(settings, device=str(processes.device))
        inputs = _read(settings)
        identity = _identity(settings, processes.count)
        if settings.resume:
            place = checkpoints.place_of(settings.out, identity)
            if processes.is_first:
                record = {"event": "resumed", "step": place.step}
                report({"time_s": round(place.elapsed_s, 3), **record})
        dtype = torch.bfloat16 if processes.device.type == "cuda" else torch.float32
        target = load_transformer(
            settings.target, inputs.spec, dtype=dtype, device=processes.device
        )
        # Two checkpoints (the old one stays until the new one is whole) and the model.
        size = num_bytes(inputs.plan.spec, 4)
        check_space(settings.out, 2 * 3 * size + 2 * target.embedding.numel() * 4)
        sampler = _sampler(settings, inputs, target)
        kept_ids = _kept_ids(settings, inputs, sampler, processes, identity)
        student = load_student(inputs.plan, target, kept_ids)
        if not settings.resume and processes.is_first:
            (settings.out / CURVE_FILE).unlink(missing_ok=True)
        trainer = Trainer(
            settings,
            student,
            sampler,
            _source(settings, inputs.tokenizer, inputs.given, inputs.held_out),
            _held_out(settings, inputs, sampler),
            processes,
            default_backend(processes.device),
            report,
        )
        if settings.resume:
            trainer.resume(identity)
        scores = trainer.run(identity)
        place, began = trainer.place, trainer.began
        if not processes.is_first:
            return None
        write_folder(settings.out, student, inputs.plan, settings.target)
    del sampler, trainer, student, target  # the device's memory, for the measurement
    _describe(settings, inputs, place, lambda record: report(_timed(record, began)))
    return Result(settings.out, scores, place)


def _timed(record: dict[str, Any], began: float) -> dict[str, Any]:
    return {"time_s": round(time.monotonic() - began, 3), **record}


def _describe(
    settings: Settings, inputs: _Inputs, place: checkpoints.Place, report: Report
) -> None:
    """Measure the folder as anybody would, and write table, plot and card into it."""
    request = Request(
        target=settings.target,
        draft=settings.out,
        prompts=inputs.measured,
        num_tokens=min(settings.length, MEASURED_TOKENS),
        free_rows=min(settings.eval_rows, MEASURED_FREE_ROWS),
        device=settings.device,
    )
    num_rows, told = len(request.prompts) + request.free_rows, -1

    def tell(share: float) -> None:
        """Report every tenth."""
        nonlocal told
        if int(share * 10) > told:
            told = int(share * 10)
            report({
                "event": "measuring", "rows": num_rows, "tokens": request.num_tokens,
                "progress": told / 10,
            })  # fmt: skip

    tell(0.0)
    measurement = measure(request, tell)
    write_measurement(settings.out, measurement)
    text = card(settings, inputs.plan, place, measurement)
    write_text(settings.out / CARD_FILE, text)


def _read(settings: Settings) -> _Inputs:
    """Raises InvalidRequest, ConfigError and ModelMismatch for whatever cannot work together."""
    tokenizer = load_tokenizer(settings.target)
    spec = read_spec(settings.target, tokenizer.vocab_size)
    narrow = [window for window in spec.windows if window is not None and window < settings.length]
    if narrow:
        raise InvalidRequest(
            f"{settings.length} exceeds the target's attention window {narrow[0]}", field="length"
        )
    if settings.length > spec.max_context_len:
        raise InvalidRequest(
            f"{settings.length} exceeds the target's context {spec.max_context_len}", field="length"
        )
    if settings.draft_vocab is not None and not 1 <= settings.draft_vocab <= spec.vocab_size:
        raise InvalidRequest(
            f"{settings.draft_vocab} of {spec.vocab_size} ids", field="draft_vocab"
        )
    if settings.init_from is None:
        plan = plan_from_target(settings.target, spec, settings.layers, settings.init_layers)
    else:
        _check_tokenizer(settings.init_from, tokenizer)
        plan = plan_from_model(settings.init_from, settings.target, spec)
    given = [] if settings.prompts is None else read_prompts(settings.prompts)
    held_out = read_prompts(settings.held_out)
    _check_openings(settings, tokenizer, given, held_out)
    measured = _measured(settings, tokenizer, held_out)
    return _Inputs(tokenizer, spec, plan, given, held_out, measured)


def _check_openings(
    settings: Settings, tokenizer: Tokenizer, given: list[str], held_out: list[str]
) -> None:
    """Raises InvalidRequest where a row has no room for the template and a request."""
    frame = chat_frame(tokenizer)
    most = _max_opening_len(settings)
    least = max(len(free_opening(tokenizer, frame).token_ids), len(frame.endings.user_suffix))
    if least > most:
        raise InvalidRequest(
            f"{settings.length} leaves {most} tokens for an opening, the chat template needs "
            f"{least}",
            field="length",
        )
    make = _source(settings, tokenizer, given, held_out)
    make(torch.Generator().manual_seed(settings.seed)).take(_TRIED_OPENINGS)


def _measured(settings: Settings, tokenizer: Tokenizer, held_out: list[str]) -> list[str]:
    """The first eval_rows held-out prompts that leave room for an answer in the measurement.

    None without a chat template. Raises InvalidRequest and ConfigError where none does.
    """
    if not chat_frame(tokenizer).is_chat:
        return []
    room = min(settings.length, MEASURED_TOKENS)
    sizes = [len(opening.token_ids) for opening in answer_openings(tokenizer, held_out)]
    if min(sizes) >= MEASURED_TOKENS:
        raise ConfigError(
            f"every prompt of {settings.held_out} is longer than {MEASURED_TOKENS - 1} tokens",
            field="held_out",
        )
    if min(sizes) >= room:
        raise InvalidRequest(
            f"no held-out prompt leaves room for an answer within {room} tokens: the shortest "
            f"takes {min(sizes)}",
            field="length",
        )
    fitting = [prompt for prompt, size in zip(held_out, sizes, strict=True) if size < room]
    return fitting[: settings.eval_rows]


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """A model with a tokenizer of its own must have the target's. Raises ModelMismatch."""
    if not (folder / TOKENIZER_FILE).is_file():
        return
    theirs = load_tokenizer(folder)
    if theirs.vocab_hash != tokenizer.vocab_hash:
        raise ModelMismatch(
            f"{folder} has another tokenizer than the target: vocabulary hash "
            f"{theirs.vocab_hash:#x}, target {tokenizer.vocab_hash:#x}",
            field="init_from",
        )


def _sampler(settings: Settings, inputs: _Inputs, target: Transformer) -> Sampler:
    endings = chat_frame(inputs.tokenizer).endings
    return Sampler(
        target,
        replace(endings, max_user_len=min(endings.max_user_len, settings.length // 3)),
        num_rows=settings.sample_rows,
        length=settings.length,
        max_opening_len=_max_opening_len(settings),
    )


def _max_opening_len(settings: Settings) -> int:
    return max(2, settings.length * 3 // 4)


def _source(
    settings: Settings, tokenizer: Tokenizer, given: list[str], held_out: list[str]
) -> Callable[[torch.Generator], PromptSource]:
    def make(generator: torch.Generator) -> PromptSource:
        return PromptSource(
            tokenizer,
            generator,
            given=given,
            held_out=held_out,
            max_opening_len=_max_opening_len(settings),
        )

    return make


def _held_out(settings: Settings, inputs: _Inputs, sampler: Sampler) -> HeldOut:
    """Held-out rows, the same for every run of a target and seedless: runs can be compared."""
    frame = chat_frame(inputs.tokenizer)
    openings: dict[str, list[Opening]] = {"free": [free_opening(inputs.tokenizer, frame)]}
    if frame.is_chat:
        longest = _max_opening_len(settings)
        answers = [
            opening
            for opening in answer_openings(inputs.tokenizer, inputs.held_out)
            if len(opening.token_ids) <= longest
        ]
        openings = {"answers": answers, **openings} if answers else openings
    generator = torch.Generator(settings.device).manual_seed(_HELD_OUT_SEED)
    return HeldOut.draw(sampler, openings, settings.eval_rows, generator)


def _kept_ids(
    settings: Settings,
    inputs: _Inputs,
    sampler: Sampler,
    processes: Processes,
    identity: dict[str, Any],
) -> Tensor | None:
    """Ids of a restricted head: the most frequent ones of a sample of the target's text."""
    if settings.draft_vocab is None:
        return None
    if settings.resume:
        ids: Tensor = checkpoints.load(settings.out, identity, processes.device)[1]["head_ids"]
        return ids
    seed = settings.seed + _VOCABULARY_SEED
    make = _source(settings, inputs.tokenizer, inputs.given, inputs.held_out)
    source = make(torch.Generator().manual_seed(seed))
    noise = torch.Generator(processes.device).manual_seed(seed)
    rows = sampler.draw(source.take(settings.sample_rows * 2), noise)
    drawn = rows.next_tokens[rows.turns != int(Turn.PROMPT)].long()
    counts = processes.sum(torch.bincount(drawn, minlength=inputs.spec.vocab_size))
    return most_frequent(counts, settings.draft_vocab, inputs.tokenizer.eos_ids)


def _identity(settings: Settings, num_processes: int) -> dict[str, Any]:
    """What two parts of one run must share: everything that the samples and weights follow from."""
    names = (
        "layers", "init_layers", "draft_vocab", "optimizer", "batch_rows", "micro_rows", "length",
        "sample_rows", "pool_rows", "reuse", "seed",
    )  # fmt: skip
    return {
        "target": fingerprint(settings.target),
        "init_from": None if settings.init_from is None else str(settings.init_from.resolve()),
        "num_processes": num_processes,
        **{name: json.loads(json.dumps(getattr(settings, name))) for name in names},
    }
