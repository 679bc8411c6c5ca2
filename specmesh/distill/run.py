"""`specmesh distill` from settings to a folder: loads, checks, trains, writes, describes.

Owns the order of a run. Must not know flags.
"""

from __future__ import annotations

import json
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
from specmesh.distill.processes import Processes
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
from specmesh.errors import ConfigError, ModelMismatch
from specmesh.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

MEASURED_TOKENS, MEASURED_FREE_ROWS = 384, 64  # of the card's measurement, prompt included
_VOCABULARY_SEED, _HELD_OUT_SEED = 1 << 40, 1 << 41  # apart from the pools' and each other


@dataclass(frozen=True, slots=True)
class Result:
    """What a run made: its folder, last scores by name, and how far it came."""

    folder: Path
    scores: dict[str, Score]
    place: checkpoints.Place


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything read from disk, on the device."""

    tokenizer: Tokenizer
    spec: ModelSpec
    plan: Plan
    target: Transformer
    given: list[str]
    held_out: list[str]


def target_folder(target: Path, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The target's folder; a .gguf file is converted once. Raises ConfigError."""
    if target.suffix != ".gguf":
        return target
    from specmesh.engine.model_folder import resolve_model

    return resolve_model(target, cache_dir / "models", say)


def distill(settings: Settings, report: Report) -> Result | None:
    """Make a draft; None on every process but the first. Raises ConfigError and ModelMismatch.

    report is given one record for each event of the curve.
    """
    with Processes(torch.device(settings.device)) as processes:
        settings = replace(settings, device=str(processes.device))
        settings.check(processes.count)
        inputs = _load(settings, processes.device)
        # Two checkpoints (the old one stays until the new one is whole) and the model.
        size = num_bytes(inputs.plan.spec, 4)
        check_space(settings.out, 2 * 3 * size + 2 * inputs.target.embedding.numel() * 4)
        sampler = _sampler(settings, inputs)
        kept_ids = _kept_ids(settings, inputs, sampler, processes)
        student = load_student(inputs.plan, inputs.target, kept_ids)
        if not settings.resume and processes.is_first:
            for name in (checkpoints.FILE, CURVE_FILE):
                (settings.out / name).unlink(missing_ok=True)
        trainer = Trainer(
            settings,
            student,
            sampler,
            _source(settings, inputs),
            _held_out(settings, inputs, sampler),
            processes,
            default_backend(processes.device),
            report,
        )
        identity = _identity(settings, processes.count)
        if settings.resume:
            trainer.resume(identity)
        scores = trainer.run(identity)
        place = trainer.place
        if not processes.is_first:
            return None
        write_folder(settings.out, student, inputs.plan, settings.target)
    del sampler, trainer, student  # the device's memory, for the measurement
    _describe(settings, inputs, place)
    return Result(settings.out, scores, place)


def _describe(settings: Settings, inputs: _Inputs, place: checkpoints.Place) -> None:
    """Measure the folder as anybody would, and write table, plot and card into it."""
    has_chat = chat_frame(inputs.tokenizer).is_chat
    measurement = measure(
        Request(
            target=settings.target,
            draft=settings.out,
            prompts=inputs.held_out if has_chat else [],
            num_tokens=min(settings.length, MEASURED_TOKENS),
            free_rows=MEASURED_FREE_ROWS,
            device=settings.device,
        )
    )
    write_measurement(settings.out, measurement)
    text = card(settings, inputs.plan, place, measurement)
    write_text(settings.out / CARD_FILE, text)


def _load(settings: Settings, device: torch.device) -> _Inputs:
    tokenizer = load_tokenizer(settings.target)
    spec = read_spec(settings.target, tokenizer.vocab_size)
    narrow = [window for window in spec.windows if window is not None and window < settings.length]
    if narrow:
        raise ConfigError(
            f"{settings.length} exceeds the target's attention window {narrow[0]}", field="length"
        )
    if settings.length > spec.max_context_len:
        raise ConfigError(
            f"{settings.length} exceeds the target's context {spec.max_context_len}", field="length"
        )
    if settings.draft_vocab is not None and not 1 <= settings.draft_vocab <= spec.vocab_size:
        raise ConfigError(f"{settings.draft_vocab} of {spec.vocab_size} ids", field="draft_vocab")
    if settings.init_from is None:
        plan = plan_from_target(settings.target, spec, settings.layers, settings.init_layers)
    else:
        _check_tokenizer(settings.init_from, tokenizer)
        plan = plan_from_model(settings.init_from, settings.target, spec)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return _Inputs(
        tokenizer,
        spec,
        plan,
        load_transformer(settings.target, spec, dtype=dtype, device=device),
        [] if settings.prompts is None else read_prompts(settings.prompts),
        read_prompts(settings.held_out),
    )


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


def _sampler(settings: Settings, inputs: _Inputs) -> Sampler:
    endings = chat_frame(inputs.tokenizer).endings
    return Sampler(
        inputs.target,
        replace(endings, max_user_len=min(endings.max_user_len, settings.length // 3)),
        num_rows=settings.sample_rows,
        length=settings.length,
        max_opening_len=max(2, settings.length * 3 // 4),
    )


def _source(settings: Settings, inputs: _Inputs) -> Callable[[torch.Generator], PromptSource]:
    def make(generator: torch.Generator) -> PromptSource:
        return PromptSource(
            inputs.tokenizer,
            generator,
            given=inputs.given,
            held_out=inputs.held_out,
            max_opening_len=max(2, settings.length * 3 // 4),
        )

    return make


def _held_out(settings: Settings, inputs: _Inputs, sampler: Sampler) -> HeldOut:
    """Held-out rows, the same for every run of a target and seedless: runs can be compared."""
    frame = chat_frame(inputs.tokenizer)
    openings: dict[str, list[Opening]] = {"free": [free_opening(inputs.tokenizer, frame)]}
    if frame.is_chat:
        longest = max(2, settings.length * 3 // 4)
        answers = [
            opening
            for opening in answer_openings(inputs.tokenizer, inputs.held_out)
            if len(opening.token_ids) <= longest
        ]
        openings = {"answers": answers, **openings} if answers else openings
    device = inputs.target.embedding.device
    generator = torch.Generator(device).manual_seed(_HELD_OUT_SEED)
    return HeldOut.draw(sampler, openings, settings.eval_rows, generator)


def _kept_ids(
    settings: Settings, inputs: _Inputs, sampler: Sampler, processes: Processes
) -> Tensor | None:
    """Ids of a restricted head: the most frequent ones of a sample of the target's text."""
    if settings.draft_vocab is None:
        return None
    if settings.resume:
        found = checkpoints.load(
            settings.out, _identity(settings, processes.count), processes.device
        )
        if found is not None:
            ids: Tensor = found[1]["head_ids"]
            return ids
    seed = settings.seed + _VOCABULARY_SEED
    source = _source(settings, inputs)(torch.Generator().manual_seed(seed))
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
