"""`python -m draft_service.bench_outcomes`: how often a draft foresees how a round ends.

Draft and target are real services on this machine's processors, prompts the project's own held-out
ones. Rounds that end their answer are left out: none follows them. Every number comes with its
standard error, answers taken as independent. The rounds are draft_service/bench_rounds.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draft_service.bench_rounds import Ended, Link, Rounds, opening_of
from draft_service.outcomes import closing_ids, likely_outcomes
from protos.specmesh.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specmesh import wire
from specmesh.bench.measure import versions
from specmesh.cli.up import default_cache_dir, resolve_models
from specmesh.distill.prompts import HELD_OUT_FILE, read_prompts
from specmesh.launcher import Ports, Stack, StackOptions, plan
from specmesh.rpc import RpcLimits, create_channel
from specmesh.tokenizer import load_tokenizer

NUM_OUTCOMES = (4, 8, 16, 32, 64)
RANKS = (1, 2, 4, 8, 16, 32)
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """How a round of an answer ended. Ranks of its closing token, from 1, infinite where it has
    none: among the ids that the draft foresees, and by the weights of the draft's row alone.
    foreseen: whether the outcome is, by how many are prepared."""

    answer: int
    num_tokens: int
    is_bonus: bool
    rank: float
    rank_alone: float
    foreseen: dict[int, bool]


def judged(ended: Ended) -> Round:
    """What the draft foresaw of a round."""
    proposal, seen = ended.proposal, (ended.proposal, ended.behind, ended.noise)
    kept, token = ended.verdict.num_accepted, ended.verdict.tokens[-1]
    rejected = proposal.tokens[kept : kept + 1]
    row = wire.decode([*proposal.distributions, ended.behind][kept], ended.behind.vocab_size)
    assert row.ids is not None  # sparse rows were asked for
    by_weight = row.ids[row.weights.argsort(descending=True, stable=True)].tolist()
    return Round(
        answer=ended.noise.seed,
        num_tokens=len(ended.verdict.tokens),
        is_bonus=not rejected,
        rank=_rank(token, closing_ids(*seen)[kept]),
        rank_alone=_rank(token, [each for each in by_weight if each not in rejected]),
        foreseen={n: (kept, token) in likely_outcomes(*seen, n) for n in NUM_OUTCOMES},
    )


def _rank(token: int, ids: Sequence[int]) -> float:
    return ids.index(token) + 1 if token in ids else math.inf


def mean(rounds: Sequence[Round], values: Sequence[float], unit: str = "1") -> dict[str, Any]:
    """The average of a value of each round, as JSON lines hold it. There is a round."""
    average = sum(values) / len(rounds)
    differences: dict[int, float] = {}  # from it, added up by answer
    for each, value in zip(rounds, values, strict=True):
        differences[each.answer] = differences.get(each.answer, 0.0) + value - average
    error = math.hypot(*differences.values()) / len(rounds)
    return {"unit": unit, "value": average, "standard_error": error, "n": len(rounds)}


def summary(rounds: Sequence[Round]) -> dict[str, dict[int, dict[str, Any]]]:
    """Averages by case and, in it, by number of outcomes or rank. Cases without rounds are left
    out."""
    found = {
        "tokens a round": {1: mean(rounds, [each.num_tokens for each in rounds], "{token}")},
        "foreseen, n outcomes": {
            n: mean(rounds, [each.foreseen[n] for each in rounds]) for n in NUM_OUTCOMES
        },
    }
    for name, is_bonus in (("rejection", False), ("all kept", True)):
        own = [each for each in rounds if each.is_bonus == is_bonus]
        if own:
            found[f"{name}, first n"] = {
                n: mean(own, [each.rank <= n for each in own]) for n in RANKS
            }
            found[f"{name}, first n of the row alone"] = {
                n: mean(own, [each.rank_alone <= n for each in own]) for n in RANKS
            }
    return found


def table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """A line a case: each number, its average and, in brackets, the standard error."""
    lines = []
    for name, means in found.items():
        cells = [f"{n} {m['value']:.3f} ({m['standard_error']:.3f})" for n, m in means.items()]
        lines.append(f"{name:36}" + "  ".join(cells) + "\n")
    return "".join(lines)


async def measure(stack: Stack, folder: Path, asked: argparse.Namespace) -> list[Round]:
    """As many rounds as are asked for. folder: of the tokenizer."""
    tokenizer = load_tokenizer(folder)
    questions = itertools.cycle(read_prompts(HELD_OUT_FILE))
    prompts = (tokenizer.chat([{"role": "user", "content": each}]) for each in questions)
    drafts: Any = draft_pb2_grpc.DraftServiceStub  # generated without types
    targets: Any = target_pb2_grpc.TargetServiceStub
    found: list[Round] = []
    async with (
        create_channel(stack.address("draft"), RpcLimits()) as to_draft,
        create_channel(stack.address("target"), RpcLimits()) as to_target,
    ):
        target = targets(to_target)
        info = (await target.GetInfo(target_pb2.TargetServiceGetInfoRequest())).info
        rounds = Rounds(
            Link(drafts(to_draft), draft_pb2.DraftServiceLinkRequest, draft_pb2.DraftCommand),
            Link(target, target_pb2.TargetServiceLinkRequest, target_pb2.TargetCommand),
            opening_of(info, asked.temperature),
            asked.num_draft_tokens,
        )
        async for ended in rounds.run(prompts, asked.sessions):
            found.append(judged(ended))
            if len(found) == asked.rounds:
                break
    return found


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(prog="python -m draft_service.bench_outcomes")
    parser.add_argument("--target", type=Path, help="model folder; the default pair's unless given")
    parser.add_argument("--draft", type=Path, help="likewise")
    parser.add_argument("--rounds", type=int, default=3000, help="rounds to look at")
    parser.add_argument("--sessions", type=int, default=16, help="answers side by side")
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=4, help="candidates a round")
    parser.add_argument("--temperature", type=float, default=1.0, help="above 0")
    parser.add_argument("--output", type=Path, help="file that JSON lines are appended to")
    asked = parser.parse_args(argv)
    if min(asked.rounds, asked.sessions, asked.num_draft_tokens, asked.temperature) <= 0:
        parser.error("--rounds, --sessions, -k and --temperature must be above 0")
    return asked


def main(argv: Sequence[str]) -> int:
    """Measure, print a table and write JSON lines. Returns the exit status."""
    asked = parsed(argv)
    target, draft = resolve_models(asked.target, asked.draft, default_cache_dir())
    with TemporaryDirectory(prefix="specmesh-outcomes-") as log_dir:
        planned = plan(StackOptions(target, draft, Path(log_dir), ports=Ports(0, 0, 0)))
        with Stack([each for each in planned if each.name != "coordinator"]) as stack:
            stack.wait_ready(START_TIMEOUT_S)
            rounds = asyncio.run(measure(stack, target, asked))
    found = summary(rounds)
    sys.stdout.write(table(found))
    if asked.output is not None:
        command = shlex.join(["python", "-m", "draft_service.bench_outcomes", *argv])
        common = {"command": command, "versions": versions()}
        with asked.output.open("a") as lines:
            for name, means in found.items():
                for n, each in means.items():
                    lines.write(json.dumps({"case": name, "of": n} | each | common) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
