"""`specmesh distill`: makes a draft for a target from the target alone."""

from __future__ import annotations

from pathlib import Path

import typer

from specmesh.cli.up import default_cache_dir
from specmesh.errors import InvalidRequest


def distill(
    target: Path = typer.Option(..., "--target", help="Folder or .gguf file of the target model."),
    out: Path = typer.Option(
        ..., "--out", help="Folder for the draft, its card, the curve and the checkpoint."
    ),
    layers: int = typer.Option(4, "--layers", min=1, help="Layers of the draft."),
    init_layers: str | None = typer.Option(
        None, "--init-layers", help="Target layers it starts as, 0,10,20,29; default: even."
    ),
    init_from: Path | None = typer.Option(
        None, "--init-from", help="Start from a smaller model of the target's width instead."
    ),
    minutes: float | None = typer.Option(
        None, "--minutes", help="Time for sampling and training; default 20 without --max-steps."
    ),
    max_steps: int | None = typer.Option(None, "--max-steps", help="Optimizer steps at most."),
    prompts: Path | None = typer.Option(
        None, "--prompts", help="JSONL file with a `prompt` a line, in place of made requests."
    ),
    held_out: Path | None = typer.Option(
        None, "--held-out", help="JSONL prompts to measure on, kept out of training."
    ),
    draft_vocab: int | None = typer.Option(
        None, "--draft-vocab", help="The head covers only the N most frequent tokens."
    ),
    optimizer: str = typer.Option("muon", "--optimizer", help="muon or adamw."),
    learning_rate: float = typer.Option(2e-3, "--learning-rate", help="Peak learning rate."),
    batch_rows: int = typer.Option(64, "--batch-rows", help="Rows of an optimizer step."),
    micro_rows: int = typer.Option(
        64, "--micro-rows", help="Rows of one pass; gradients accumulate."
    ),
    length: int = typer.Option(512, "--length", help="Tokens of a row."),
    sample_rows: int = typer.Option(2048, "--sample-rows", help="Rows sampled together."),
    pool_rows: int = typer.Option(
        8192, "--pool-rows", help="Rows sampled before training goes on."
    ),
    reuse: int = typer.Option(3, "--reuse", help="Times that each sampled row is trained on."),
    report_steps: int = typer.Option(
        200, "--report-steps", help="Steps between evaluations, each with a checkpoint."
    ),
    eval_rows: int = typer.Option(256, "--eval-rows", help="Held-out rows of each kind."),
    seed: int = typer.Option(0, "--seed", min=0, help="Everything random follows from it."),
    device: str | None = typer.Option(None, "--device", help="cpu or cuda; default: a GPU if any."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the checkpoint in --out."),
    cache_dir: Path | None = typer.Option(
        None, "--cache-dir", envvar="SPECMESH_CACHE_DIR", help="As of `specmesh up`."
    ),
) -> None:
    """Make a draft model that `specmesh up` loads, trained on the target's own text.

    Several GPUs: start it with torchrun --nproc-per-node N -m specmesh.distill FLAGS.
    """
    import torch

    from specmesh.distill.progress import say, show
    from specmesh.distill.prompts import HELD_OUT_FILE
    from specmesh.distill.run import distill as run
    from specmesh.distill.run import target_folder
    from specmesh.distill.settings import Settings

    if optimizer not in ("muon", "adamw"):
        raise InvalidRequest(f"{optimizer!r}: expected muon or adamw", field="optimizer")
    settings = Settings(
        target=target_folder(target, cache_dir or default_cache_dir(), say),
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
