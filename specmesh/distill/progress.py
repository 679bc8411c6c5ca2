"""What a run prints while it goes on: one line an event, on standard error."""

from __future__ import annotations

import sys
from typing import Any


def show(record: dict[str, Any]) -> None:
    """One line of progress on standard error."""
    elapsed = f"{record['time_s']:8.1f} s"
    if record["event"] == "sampled":
        rate = record["tokens"] / record["seconds"]
        say(
            f"{elapsed}  sampled pool {record['pool']}: {record['rows']} rows in "
            f"{record['seconds']:.1f} s ({rate:.0f} tokens/s)"
        )
    elif record["event"] == "resumed":
        say(f"{elapsed}  goes on from step {record['step']}, as the checkpoint in --out has it")
    elif record["event"] == "measuring":
        say(
            f"{elapsed}  measuring the draft for its card  {record['progress']:4.0%}  "
            f"({record['rows']} rows of {record['tokens']} tokens, at each temperature)"
        )
    else:
        scores = "  ".join(
            f"{name} {score['acceptance']:.4f}" for name, score in record["scores"].items()
        )
        trained = record["tokens_trained"] / 1e6
        say(
            f"{elapsed}  step {record['step']:6d}  {record['progress']:4.0%}  "
            f"trained {trained:.2f} M tokens  acceptance: {scores}"
        )


def say(text: str) -> None:
    """Write a line at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
