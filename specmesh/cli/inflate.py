"""`specmesh inflate`: a larger checkpoint with exactly a small model's function.

What is written and why it is the same function is `specmesh/inflate`'s; this file reads flags.
"""

from __future__ import annotations

from pathlib import Path

import typer

from specmesh.cli.output import progress, stdout


def inflate(
    model: Path = typer.Option(..., "--model", help="Folder of the small model."),
    out: Path = typer.Option(..., "--out", help="Folder to write; must not exist."),
    shape: str | None = typer.Option(None, "--shape", help="llama-8b or llama-1b."),
    hidden_size: int | None = typer.Option(None, "--hidden-size", min=1),
    intermediate_size: int | None = typer.Option(None, "--intermediate-size", min=1),
    num_layers: int | None = typer.Option(None, "--num-layers", min=1),
    num_heads: int | None = typer.Option(None, "--num-heads", min=1),
    num_kv_heads: int | None = typer.Option(None, "--num-kv-heads", min=1),
    head_dim: int | None = typer.Option(None, "--head-dim", min=1),
    embedding_from: Path | None = typer.Option(
        None, "--embedding-from", help="Model that a draft without embedding shares it with."
    ),
    dtype: str = typer.Option("bfloat16", "--dtype", help="bfloat16, float16 or float32."),
    device: str = typer.Option("cpu", "--device", help="Where the random numbers are drawn."),
    tied: bool = typer.Option(False, "--tied/--untied", help="The embedding serves as head."),
    seed: int = typer.Option(0, "--seed", min=0, help="Of the random numbers."),
) -> None:
    """Write a larger checkpoint that computes exactly a small model's function."""
    from specmesh import inflate as package

    numbers = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    wanted = package.requested_shape(shape, numbers)
    with progress(f"writing {out}") as status:
        done = package.inflate(
            model,
            out,
            wanted,
            package.InflateOptions(dtype, device, tied, seed),
            embedding_from=embedding_from,
            report=status.update if status is not None else None,
        )
    stdout().print(done.describe(), markup=False)
