"""`specmesh bench-stack`: the whole stack under steady load, speculation on and off, in one run.

What is measured and how is `specmesh/bench/stack.py`'s; this file reads flags, keeps results and
prints a table.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from specmesh.cli.flags import usable_device
from specmesh.cli.output import progress, stderr, stdout, table
from specmesh.cli.up import SERVICES, default_cache_dir, resolve_models, settings_flags
from specmesh.errors import InvalidRequest, SpecmeshError

if TYPE_CHECKING:
    from specmesh.bench.stack import Deployment, Limits, Record, StackBench
    from specmesh.bench.stack_cases import Case

_NUMBERS = frozenset({"value", "p20", "p80", "baseline"})


def bench_stack(
    target: Path | None = typer.Option(None, "--target", help="Folder of the target model."),
    draft: Path | None = typer.Option(None, "--draft", help="Folder of the draft model."),
    other_draft: list[str] = typer.Option(
        [], "--other-draft", help="LABEL=DIR, a further draft with its own coordinator. Repeatable."
    ),
    target_device: str = typer.Option("cpu", "--target-device", help="For instance cuda:0."),
    draft_device: str = typer.Option("cpu", "--draft-device", help="For instance cuda:1."),
    dtype: str = typer.Option("auto", "--dtype", help="As of --engine.dtype."),
    set_: list[str] = typer.Option(
        [],
        "--set",
        help="SERVICE.section.key=value, as of up: of every draft, coordinator or the target. "
        "SERVICE may be draft-LABEL or coordinator-LABEL too: that one alone, after those of all.",
    ),
    concurrency: str = typer.Option("1,4,16,64", "--concurrency", help="Live streams."),
    cases: str = typer.Option("", "--cases", help="Names with * and ?, comma-separated; all."),
    list_: bool = typer.Option(False, "--list", help="Print the cases and their time; run none."),
    seconds: float = typer.Option(10.0, "--seconds", min=0.5, help="Window of a case."),
    warm_up: float = typer.Option(2.0, "--warm-up", min=0.1, help="Seconds before each window."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=8, help="Of one answer at most."),
    prompts: Path | None = typer.Option(None, "--prompts", help="JSONL; default: the shipped."),
    long_prompt: int = typer.Option(
        512, "--long-prompt", min=1, help="Prompt tokens of the stack-plain cases."
    ),
    baselines: bool = typer.Option(
        False, "--baselines", help="transformers generate and assisted generation too."
    ),
    baseline_device: str | None = typer.Option(
        None, "--baseline-device", help="Default: the draft's."
    ),
    cache_dir: Path | None = typer.Option(None, "--cache-dir", envvar="SPECMESH_CACHE_DIR"),
    start_timeout: float = typer.Option(300.0, "--start-timeout", min=1, help="Seconds."),
    output: Path | None = typer.Option(None, "--output", help="Append JSON lines to a file."),
) -> None:
    """Measure the stack with 1 to 64 live streams: plain, policy and fixed candidates."""
    from specmesh.bench.stack import Deployment, Limits
    from specmesh.bench.stack_cases import CHAT_PROMPTS, selected, standard_cases
    from specmesh.launcher import new_log_dir

    others = _labelled(other_draft)
    labels = [label for label, _ in others]
    extra = settings_flags(set_, [*SERVICES, *_labelled_services(labels)])
    found = standard_cases(_counts(concurrency), labels)
    chosen = selected(found, [each for each in cases.split(",") if each])
    if list_:
        return _print_cases(chosen, seconds + warm_up)
    target_device = usable_device(target_device, "target_device")
    draft_device = usable_device(draft_device, "draft_device")
    device = usable_device(baseline_device or draft_device, "baseline_device")
    cache_dir = cache_dir or default_cache_dir()
    target, draft = resolve_models(target, draft, cache_dir)
    assert draft is not None, "only --no-draft goes without one"
    deployment = Deployment(
        target_dir=target,
        drafts=[("", draft), *others],
        log_dir=new_log_dir(cache_dir / "logs"),
        target_device=target_device,
        draft_device=draft_device,
        dtype=dtype,
        extra=extra,
        start_timeout_s=start_timeout,
    )
    keep = _Keep(output)
    load = _Prompts(prompts or CHAT_PROMPTS, long_prompt)
    limits = Limits(seconds, warm_up, max_tokens)
    _run(deployment, chosen, load, limits, keep, device if baselines else None)
    keep.print_table()
    if keep.failed:
        raise typer.Exit(1)
    return None


@dataclass(frozen=True, slots=True)
class _Prompts:
    file: Path
    long_tokens: int


def _print_cases(cases: Sequence[Case], case_s: float) -> None:
    for case in cases:
        stdout().print(case.name, markup=False)
    stdout().print(f"{len(cases)} cases, about {len(cases) * case_s:.0f} s")


class _Keep:
    """Results as they come: to the file at once, to the table at the end."""

    def __init__(self, output: Path | None) -> None:
        self._output = output
        self._records: list[Record] = []
        self.failed: list[str] = []

    def __call__(self, records: Sequence[Record]) -> None:
        """Keep these records."""
        self._records += records
        if self._output is not None:
            with self._output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def fail(self, name: str, error: SpecmeshError) -> None:
        """A case came to nothing; the others go on."""
        self.failed.append(name)
        stderr().print(f"{name} failed: {error}", markup=False)

    def print_table(self) -> None:
        """Headline results: what has a name of its own, and tokens per second."""
        shown = table("", "what", "value", "p20", "p80", "unit", "baseline", right=_NUMBERS)
        for record in self._records:
            if _is_detail(record["name"]):
                continue
            against = record["baseline"]
            beside = "" if against is None else f"{against['value']:.3f}"
            numbers = (f"{record[key]:.3f}" for key in ("value", "p20", "p80"))
            shown.add_row(record["name"], *numbers, record["unit"], beside)
        stdout().print(shown)


def _is_detail(name: str) -> bool:
    """Latencies and parts of rounds are in the file only."""
    tail = name.rpartition("-c")[2]
    return not tail.isdecimal() and not name.endswith(("tokens-per-s", "stack-start"))


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise InvalidRequest(f"{text!r}: {error}", field="concurrency") from error
    if not counts or counts[0] < 1:
        raise InvalidRequest(f"{text!r}: expected numbers from 1", field="concurrency")
    return counts


def _labelled(drafts: Sequence[str]) -> list[tuple[str, Path]]:
    found = []
    for text in drafts:
        label, equals, folder = text.partition("=")
        if not equals or not label.isalnum():
            raise InvalidRequest(f"{text!r} is not LABEL=DIR", field="other_draft")
        found.append((label, Path(folder)))
    labels = [label for label, _ in found]
    if len(set(labels)) < len(labels):
        raise InvalidRequest(f"a label twice among {', '.join(labels)}", field="other_draft")
    return found


def _labelled_services(labels: Sequence[str]) -> list[str]:
    """What each further draft has of its own, as its processes are called."""
    return [f"{service}-{label}" for label in labels for service in ("coordinator", "draft")]


def _run(
    deployment: Deployment,
    cases: Sequence[Case],
    prompts: _Prompts,
    limits: Limits,
    keep: _Keep,
    baseline_device: str | None,
) -> None:
    from specmesh.bench.stack import StackBench, running
    from specmesh.bench.stack_cases import chat_ids, long_ids, read_prompts
    from specmesh.bench.steady_load import LoadProcesses
    from specmesh.launcher import Interrupted, interruptible
    from specmesh.tokenizer import load_tokenizer

    texts, tokenizer = read_prompts(prompts.file), load_tokenizer(deployment.target_dir)
    chat = chat_ids(tokenizer, texts)
    ids = {False: chat, True: long_ids(tokenizer, texts, prompts.long_tokens)}
    most = max(case.concurrency for case in cases)
    try:
        with (
            interruptible(),
            TemporaryDirectory(prefix="specmesh-bench-") as folder,
            progress("measuring the stack"),
            LoadProcesses(most) as processes,
            running(deployment, Path(folder)) as started,
        ):
            command = shlex.join(["specmesh", *sys.argv[1:]])
            bench = StackBench(started, processes, ids, limits, command)
            keep([bench.start_record()])
            bench.warm_up(most)
            for case in cases:
                stderr().print(case.name, markup=False)
                try:
                    keep(bench.measure(case))
                except SpecmeshError as error:
                    started.stack.check()
                    keep.fail(case.name, error)
            if baseline_device is not None:
                _baselines(bench, deployment, chat, limits, keep, baseline_device)
    except Interrupted as interrupted:
        keep.print_table()
        raise typer.Exit(128 + interrupted.signum) from None


def _baselines(
    bench: StackBench,
    deployment: Deployment,
    ids: Sequence[Sequence[int]],
    limits: Limits,
    keep: _Keep,
    device: str,
) -> None:
    """transformers on the same weights, while the stack idles."""
    from specmesh.bench.baselines import TransformersModels

    stderr().print("transformers", markup=False)
    dtype = deployment.dtype
    if dtype == "auto":
        dtype = "float32" if device.startswith("cpu") else "bfloat16"
    models = TransformersModels(
        deployment.target_dir, deployment.drafts[0][1], device=device, dtype=dtype
    )
    for name, assisted in (("generate", False), ("assisted", True)):
        for suffix, temperature in (("", 1.0), ("-greedy", 0.0)):
            measured = models.ms_per_token(
                ids,
                max_tokens=limits.max_tokens,
                temperature=temperature,
                seconds=limits.window_s,
                assisted=assisted,
            )
            keep([bench.baseline_record(f"transformers-{name}{suffix}-c1", measured)])
