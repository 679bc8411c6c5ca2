"""`specmesh distill`: makes a draft for a target from the target alone."""

from __future__ import annotations

from pathlib import Path

import typer

from specmesh.cli.up import default_cache_dir
from specmesh.errors import InvalidRequest

_TARGET = typer.Option(..., "--target", help="Folder or .gguf file of the target model.")
_OUT = typer.Option(
    ...,
    "--out",
    help="Folder for the draft, its card, the curve and the checkpoint; a new run is refused where "
    "one holds a checkpoint or model.",
)
_LAYERS = typer.Option(4, "--layers", min=1, help="Layers of the draft.")
_INIT_LAYERS = typer.Option(
    None, "--init-layers", help="Target layers it starts as, 0,10,20,29; default: even."
)
_INIT_FROM = typer.Option(
    None, "--init-from", help="Start from a smaller model of the target's width instead."
)
_MINUTES = typer.Option(
    None,
    "--minutes",
    help="Time for sampling and training; default 20 without --max-steps. The card's measurement "
    "comes after it.",
)
_MAX_STEPS = typer.Option(None, "--max-steps", help="Optimizer steps at most.")
_PROMPTS = typer.Option(
    None, "--prompts", help="JSONL file with a `prompt` a line, in place of made requests."
)
_HELD_OUT = typer.Option(
    None, "--held-out", help="JSONL prompts to measure on, kept out of training."
)
_DRAFT_VOCAB = typer.Option(
    None, "--draft-vocab", help="The head covers only the N most frequent tokens."
)
_OPTIMIZER = typer.Option("muon", "--optimizer", help="muon or adamw.")
_LEARNING_RATE = typer.Option(2e-3, "--learning-rate", help="Peak learning rate.")
_BATCH_ROWS = typer.Option(
    64, "--batch-rows", help="Rows of an optimizer step, over all processes."
)
_MICRO_ROWS = typer.Option(64, "--micro-rows", help="Rows of one pass; gradients accumulate.")
_LENGTH = typer.Option(512, "--length", help="Tokens of a row, prompt included.")
_SAMPLE_ROWS = typer.Option(2048, "--sample-rows", help="Rows sampled together.")
_POOL_ROWS = typer.Option(8192, "--pool-rows", help="Rows sampled before training goes on.")
_REUSE = typer.Option(3, "--reuse", help="Times that each sampled row is trained on.")
_REPORT_STEPS = typer.Option(
    300, "--report-steps", help="Steps between evaluations, each with a checkpoint."
)
_EVAL_ROWS = typer.Option(
    128, "--eval-rows", help="Held-out rows of each kind, also in the card's measurement at most."
)
_SEED = typer.Option(0, "--seed", min=0, help="Everything random follows from it.")
_DEVICE = typer.Option(None, "--device", help="cpu or cuda; default: a GPU if any.")
_RESUME = typer.Option(False, "--resume", help="Go on from the checkpoint that --out must hold.")
_CACHE_DIR = typer.Option(
    None, "--cache-dir", envvar="SPECMESH_CACHE_DIR", help="As of `specmesh up`."
)


def distill(
    target: Path = _TARGET,
    out: Path = _OUT,
    layers: int = _LAYERS,
    init_layers: str | None = _INIT_LAYERS,
    init_from: Path | None = _INIT_FROM,
    minutes: float | None = _MINUTES,
    max_steps: int | None = _MAX_STEPS,
    prompts: Path | None = _PROMPTS,
    held_out: Path | None = _HELD_OUT,
    draft_vocab: int | None = _DRAFT_VOCAB,
    optimizer: str = _OPTIMIZER,
    learning_rate: float = _LEARNING_RATE,
    batch_rows: int = _BATCH_ROWS,
    micro_rows: int = _MICRO_ROWS,
    length: int = _LENGTH,
    sample_rows: int = _SAMPLE_ROWS,
    pool_rows: int = _POOL_ROWS,
    reuse: int = _REUSE,
    report_steps: int = _REPORT_STEPS,
    eval_rows: int = _EVAL_ROWS,
    seed: int = _SEED,
    device: str | None = _DEVICE,
    resume: bool = _RESUME,
    cache_dir: Path | None = _CACHE_DIR,
) -> None:
    """Make a draft model that `specmesh up` loads, trained on the target's own text.

    Several GPUs: start it with torchrun --nproc-per-node N -m specmesh.distill FLAGS.
    """
    import torch

    from specmesh.distill.progress import show
    from specmesh.distill.prompts import HELD_OUT_FILE
    from specmesh.distill.run import distill as run
    from specmesh.distill.settings import Settings

    if optimizer not in ("muon", "adamw"):
        raise InvalidRequest(f"{optimizer!r}: expected muon or adamw", field="optimizer")
    settings = Settings(
        target=target,
        out=out,
        layers=layers,
        init_layers=_indices(init_layers),
        init_from=init_from,
        minutes=20.0 if minutes is None and max_steps is None else minutes,
        max_steps=max_steps,
        prompts=prompts,
        held_out=held_out or HELD_OUT_FILE,
        draft_vocab=draft_vocab,
        optimizer="muon" if optimizer == "muon" else "adamw",
        learning_rate=learning_rate,
        batch_rows=batch_rows,
        micro_rows=micro_rows,
        length=length,
        sample_rows=sample_rows,
        pool_rows=pool_rows,
        reuse=reuse,
        report_steps=report_steps,
        eval_rows=eval_rows,
        seed=seed,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        resume=resume,
        cache_dir=cache_dir or default_cache_dir(),
    )
    result = run(settings, show)
    if result is not None:
        typer.echo(f"draft written to {result.folder}")


def _indices(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"{text!r}: expected indices like 0,10,20,29",
                             field="init_layers") from error  # fmt: skip
