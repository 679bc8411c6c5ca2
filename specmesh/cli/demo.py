"""`specmesh demo`: one answer through three real services, with what speculation did to it.

What `make demo` runs. Starts the services on free ports, streams an answer with k draft tokens a
round, repeats the prompt without speculation for comparison, draws the first request's trace, and
stops everything it started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specmesh.cli.generate import Answer, collect, user_turn
from specmesh.cli.output import progress, stderr, stdout, table, write_text
from specmesh.cli.up import default_cache_dir, resolve_models, running_stack
from specmesh.request import ChatTurn, GenerateOptions

if TYPE_CHECKING:
    from specmesh.client import Client

_NUMBERS = frozenset({"judged", "accepted", "rate", "tokens", "later tokens/s"})


def demo(
    prompt: str = typer.Argument("Explain in two sentences why the sky is blue."),
    target: Path | None = typer.Option(None, "--target", help="As of `specmesh up`."),
    draft: Path | None = typer.Option(None, "--draft", help="As of `specmesh up`."),
    cache_dir: Path | None = typer.Option(
        None, "--cache-dir", envvar="SPECMESH_CACHE_DIR", help="As of `specmesh up`."
    ),
    num_draft_tokens: int = typer.Option(
        4, "-k", "--num-draft-tokens", min=1, help="Candidates a round."
    ),
    max_tokens: int = typer.Option(96, "--max-tokens", min=2, help="Tokens of the answer."),
    temperature: float = typer.Option(0.7, "-t", "--temperature", help="0: greedy."),
    seed: int | None = typer.Option(None, "--seed", help="Makes the answer repeatable."),
) -> None:
    """Show speculative decoding at work: answer, acceptance, speed and trace of one request."""
    from specmesh.launcher import Interrupted, Ports, interruptible

    turn = user_turn(prompt)
    cache_dir = cache_dir or default_cache_dir()
    trace_dir = cache_dir / "traces"
    options = GenerateOptions(
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        rule="residual",
    )
    try:
        with interruptible():
            models = resolve_models(target, draft, cache_dir)
            ports = Ports(coordinator=0, draft=0, target=0)
            with running_stack(models, cache_dir=cache_dir, ports=ports, trace_dir=trace_dir) as (
                stack,
                seconds,
            ):
                stderr().print(f"all three services are ready after {seconds:.1f} s\n")
                _show(stack.address("coordinator"), turn, options, trace_dir)
                stderr().print("\nstopping the services")
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.signum) from None


def _show(address: str, turn: ChatTurn, options: GenerateOptions, trace_dir: Path) -> None:
    from dataclasses import replace

    from specmesh.bench.rounds import complete_trace
    from specmesh.client import Client
    from specmesh.traces.terminal import print_trace

    turns = [turn]
    with Client(address) as client:
        _warm_up(client, (options, replace(options, num_draft_tokens=0)))
        stdout().print(f"> {turn.content}", style="bold", markup=False)
        speculative = collect(client.stream(turns, options), show=True)
        write_text("\n\n")
        # As many tokens again, so that both speeds are over contexts of the same length.
        plain_options = replace(
            options, num_draft_tokens=0, max_tokens=speculative.num_tokens, ignore_eos=True
        )
        with progress("the same prompt without speculation, for comparison"):
            plain = collect(client.stream(turns, plain_options), show=False)
    _print_acceptance(speculative)
    _print_speed(speculative, plain, options.num_draft_tokens or 0)
    assert speculative.started is not None, "a stream that ends without error has started"
    if speculative.started.trace_id:
        stdout().print()
        print_trace(complete_trace(trace_dir, speculative.started.trace_id), stdout())


def _warm_up(client: Client, requests: Sequence[GenerateOptions]) -> None:
    """First requests pay for first allocations; keep that out of the comparison."""
    from dataclasses import replace

    for options in requests:
        client.generate([ChatTurn("user", "Hello")], replace(options, max_tokens=6))


def _print_acceptance(answer: Answer) -> None:
    stats = answer.finished[0].speculation
    rows = table("Acceptance", "position", "judged", "accepted", "rate", right=_NUMBERS)
    counts = zip(stats.judged_per_position, stats.accepted_per_position, strict=True)
    for position, (judged, accepted) in enumerate(counts, start=1):
        rate = f"{100 * accepted / judged:.0f} %" if judged else "-"
        rows.add_row(str(position), str(judged), str(accepted), rate)
    stdout().print(rows)
    tokens = answer.num_tokens
    stdout().print(
        f"{stats.num_accepted} of {stats.num_draft_tokens} draft tokens accepted; {tokens} tokens "
        f"in {stats.num_rounds} rounds of the target, {tokens / max(1, stats.num_rounds):.2f} a "
        "round"
    )
    for reason, count in sorted(stats.fallback_rounds.items()):
        stdout().print(f"{count} rounds went without candidates: {reason}", markup=False)
    stdout().print()


def _print_speed(speculative: Answer, plain: Answer, k: int) -> None:
    # First tokens are not compared: the second request finds the prompt in the prefix cache.
    rows = table("Speed", "", "tokens", "later tokens/s", right=_NUMBERS)
    for name, answer in ((f"speculative, k = {k}", speculative), ("plain decoding", plain)):
        later = f"{answer.tokens_per_s:.1f}" if answer.tokens_per_s is not None else "-"
        rows.add_row(name, str(answer.num_tokens), later)
    stdout().print(rows)
    stdout().print(f"first token after {1000 * (speculative.first_token_s or 0):.0f} ms")
    if speculative.tokens_per_s and plain.tokens_per_s:
        ratio = speculative.tokens_per_s / plain.tokens_per_s
        stdout().print(f"speculation made later tokens {ratio:.2f} times as fast on this machine")
