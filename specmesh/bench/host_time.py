"""What the hosts take of a round: `python -m specmesh.bench.host_time`.

Draft and target are idle services (`idle_service.py`), whose devices compute nothing: a proposal is
over after --draft-ms, a pass of the target after --target-ms. A round less both is what
coordinator, gRPC and the hosts of both services take. With -k 0 a pass of plain decoding, which is
one token, less --target-ms takes its place; a chain of n passes lasts n times as long. Where
streams are several, what they wait for each other's steps counts too. Beside it the processor time
of each process a round (or pass) of one stream, which says more where processors are few or shared.
The coordinator runs without Ray, which no round meets anyway, and without audits, which refute what
is made up and would leave the draft out. With --busy-poll-ms loops poll as on GPU hosts; give each
process a core then. With --num-ahead drafts draft ahead, and --foreseen of the rounds end as they
foresee; who waits for whom then varies, so that whole rounds are given, without anything taken off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from specmesh.bench.load import Timed, all_at_once
from specmesh.bench.measure import Series, series, versions
from specmesh.bench.suite import QUESTIONS
from specmesh.bench.timeline import Usage
from specmesh.cli.up import default_cache_dir, resolve_models
from specmesh.client import GenerateOptions
from specmesh.launcher import Ports, ServiceCommand, Stack, StackOptions, plan
from specmesh.tokenizer import load_tokenizer

START_TIMEOUT_S = 120.0
NAMES = ("coordinator", "draft", "target")
# Services lie above this package: here too (`launcher.py`) command lines alone name them.
SERVE = (
    "import sys; from {0}_service.__main__ import side_of; "
    "from specmesh.bench.idle_service import main; "
    "sys.exit(main('{0}', side_of, sys.argv[1:]))"
)


def commands(asked: argparse.Namespace, folder: Path, log_dir: Path) -> list[ServiceCommand]:
    """What to start; folder: of the tokenizer."""
    poll = str(asked.busy_poll_ms)
    untraced = ["--telemetry.sampling-ratio", "0"]
    # One thread, as where a GPU computes.
    engine = [*untraced, "--engine.busy-poll-ms", poll, "--engine.num-threads", "1"]
    coordinator = [*untraced, "--links.busy-poll-ms", poll, "--speculation.audit-ratio", "0"]
    coordinator += ["--speculation.num-ahead", str(asked.num_ahead)]
    options = StackOptions(
        folder,
        folder,
        log_dir,
        ports=Ports(0, 0, 0),
        extra={"coordinator": [*coordinator, "--no-ray"], "draft": engine, "target": engine},
    )
    found = []
    for command in plan(options):
        argv = command.argv
        if command.name != "coordinator":
            step_ms = str(asked.draft_ms if command.name == "draft" else asked.target_ms)
            _, _, _, *flags = argv  # the interpreter, -m, the service
            held = ["--step-ms", step_ms, "--foreseen", str(asked.foreseen)]
            argv = (argv[0], "-c", SERVE.format(command.name), *held, *flags)
        found.append(replace(command, argv=argv))
    return found


def send(stack: Stack, prompt: Sequence[int], asked: argparse.Namespace) -> list[Timed]:
    """The prompt once in every stream, all at once."""
    options = GenerateOptions(
        max_tokens=asked.max_tokens,
        ignore_eos=True,
        num_draft_tokens=asked.num_draft_tokens,
        rule="residual",
    )
    return all_at_once(stack.address("coordinator"), [prompt] * asked.streams, options)[1]


def counts(timed: Sequence[Timed], asked: argparse.Namespace) -> list[int]:
    """Rounds of each request, or passes of plain decoding: tokens after the prompt's first."""
    if asked.num_draft_tokens:
        return [each.finished.speculation.num_rounds for each in timed]
    return [each.num_tokens - each.num_first_tokens for each in timed]


def host_time(timed: Sequence[Timed], asked: argparse.Namespace) -> Series:
    """What is left of each request's rounds, or passes, without what the devices held."""
    name, held_ms = "host time of a pass", asked.target_ms
    if asked.num_draft_tokens and asked.num_ahead:
        name, held_ms = "a whole round", 0.0
    elif asked.num_draft_tokens:
        name, held_ms = "host time of a round", asked.draft_ms + asked.target_ms
    left_ms = [
        (each.total_s - each.first_token_s) * 1e3 / count - held_ms
        for each, count in zip(timed, counts(timed, asked), strict=True)
    ]
    return series(name, "ms", left_ms)


def measure(stack: Stack, prompt: Sequence[int], asked: argparse.Namespace) -> list[Series]:
    """Requests of so many streams at a time, after some to warm up."""
    send(stack, prompt, asked)
    before = {name: Usage.read(stack.pid(name)) for name in NAMES}
    timed = [each for _ in range(asked.repeats) for each in send(stack, prompt, asked)]
    after = {name: Usage.read(stack.pid(name)) for name in NAMES}
    made = [host_time(timed, asked)]
    num_steps = sum(counts(timed, asked))
    for name in NAMES:
        spent_ms = after[name].cpu_ms - before[name].cpu_ms
        made.append(series(f"processor time, {name}", "ms", [spent_ms / num_steps]))
    return made


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(prog="python -m specmesh.bench.host_time")
    parser.add_argument("--tokenizer", type=Path, help="folder; the default model's unless given")
    parser.add_argument("--repeats", type=int, default=12, help="times all streams are sent")
    parser.add_argument("--streams", type=int, default=1, help="requests at a time")
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=4, help="candidates a round")
    parser.add_argument("--max-tokens", type=int, default=120, help="tokens of each answer")
    parser.add_argument("--draft-ms", type=float, default=0.67, help="what a proposal takes")
    parser.add_argument("--target-ms", type=float, default=4.4, help="what a target's pass takes")
    parser.add_argument("--num-ahead", type=int, default=0, help="continuations drafted ahead")
    parser.add_argument("--foreseen", type=float, default=0.5, help="share of rounds, if ahead")
    parser.add_argument("--busy-poll-ms", type=float, default=0.0, help="loops poll for so long")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure and print one JSON object a number. Returns the exit status."""
    asked = parsed(argv)
    folder = asked.tokenizer or resolve_models(None, None, default_cache_dir())[0]
    prompt = load_tokenizer(folder).chat([{"role": "user", "content": QUESTIONS[0]}])
    with (
        TemporaryDirectory(prefix="specmesh-host-time-") as log_dir,
        Stack(commands(asked, folder, Path(log_dir))) as stack,
    ):
        stack.wait_ready(START_TIMEOUT_S)
        measured = measure(stack, prompt, asked)
    command = " ".join(("python -m specmesh.bench.host_time", *argv))
    for each in measured:
        line = each.record() | {"command": command, "versions": versions()}
        sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
