"""`specmesh acceptance`: its figures against counts from simulated rounds, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from specmesh.acceptance.measure import Request, measure
from specmesh.acceptance.report import markdown, svg
from specmesh.acceptance.rows import judge, round_to_half, run_lengths, survival
from specmesh.cli import app
from specmesh.distill.run import distill
from specmesh.errors import ConfigError, ModelMismatch
from specmesh.planning import expected_tokens
from tests.unit.distill_pair import prompt_file, settings, tiny_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target, and its one-layer student hardly trained."""
    target = tiny_target(tmp_path_factory.mktemp("target"))
    draft = tmp_path_factory.mktemp("draft")
    distill(settings(target, draft, max_steps=4), lambda _record: None)
    return target, draft


def logits(num_rows: int, num_ids: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(num_rows, num_ids, generator=generator) * 2
    return target, target + torch.randn(num_rows, num_ids, generator=generator)


def test_acceptance_and_agreement_of_known_rows() -> None:
    """Σ min(p, q), the kept share of the drawn token and equal argmaxes, by hand."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.7, 0.1]])
    columns = judge(p.log(), q.log(), torch.tensor([0]), 1.0)
    assert columns.acceptance.item() == pytest.approx(0.2 + 0.3 + 0.1)
    assert columns.kept.item() == pytest.approx(0.4)
    assert columns.agrees.item() == 0
    assert judge(p.log(), q.log(), torch.tensor([1]), 1.0).kept.item() == 1.0


def test_temperature_shapes_both_sides() -> None:
    """At temperature 1/2 both laws are squared and normalised."""
    target, draft = logits(4, 11, 1)
    columns = judge(target, draft, torch.zeros(4, dtype=torch.int64), 0.5)
    p, q = (2 * target).softmax(-1), (2 * draft).softmax(-1)
    torch.testing.assert_close(columns.acceptance, torch.minimum(p, q).sum(-1))


def test_encodings_cost_what_they_drop() -> None:
    """Truncated rows are renormalised; what that costs is bounded by the mass; bytes add up."""
    target, draft = logits(3, 2000, 2)
    columns = judge(target, draft, torch.zeros(3, dtype=torch.int64), 1.0)
    p, q = target.softmax(-1), draft.softmax(-1)
    found = {name: each[0] for name, each in columns.encodings.items()}
    sizes = {name: each[1].tolist() for name, each in columns.encodings.items()}
    assert (sizes["float32"][0], sizes["float16"][0]) == (8000, 4000)
    assert (sizes["top-256"][0], sizes["top-64"][0]) == (256 * 6, 64 * 6)
    torch.testing.assert_close(found["float16"], columns.acceptance, atol=1e-3, rtol=0)
    top = torch.zeros_like(q).scatter_(1, q.topk(64).indices, q.topk(64).values)
    expected = torch.minimum(p, top / top.sum(-1, keepdim=True)).sum(-1)
    torch.testing.assert_close(found["top-64"], expected, atol=1e-3, rtol=0)
    dropped = 1 - top.sum(-1)
    assert bool((columns.acceptance - found["top-64"] <= dropped + 1e-3).all())
    # auto: the smallest set of mass 0.99, at most 1024 ids.
    ranked = q.sort(descending=True).values.cumsum(-1)
    needed = ((ranked < 0.99).sum(-1) + 1).clamp(max=1024)
    assert sizes["auto"] == (needed * 6).tolist()


def test_half_rows_are_the_wires_rows() -> None:
    """The same rounding as the frames that services exchange."""
    from specmesh.wire import _round_to_half

    rows = torch.rand(5, 300, generator=torch.Generator().manual_seed(4)) ** 9
    expected = torch.stack([_round_to_half(row) for row in rows])
    assert torch.equal(round_to_half(rows), expected)


def test_run_lengths_stop_at_answers_ends() -> None:
    """Columns left count to the end of the same answer, never into the next conversation."""
    counted = torch.tensor([[0, 1, 1, 0, 1, 1, 1]]).bool()
    starts = torch.tensor([[1, 0, 0, 1, 0, 1, 0]]).bool()
    assert run_lengths(counted, starts).tolist() == [[0, 2, 1, 0, 1, 2, 1]]


def simulated_survival(p: torch.Tensor, q: torch.Tensor, rounds: int, depth: int) -> list[float]:
    """Play rounds: a Markov text over few ids, candidates drawn from q and judged against p."""
    generator = torch.Generator().manual_seed(9)
    counts = [0.0] * depth
    state = torch.randint(len(p), (rounds,), generator=generator)
    for _ in range(30):  # to the stationary law of the target's text
        state = torch.multinomial(p[state], 1, generator=generator)[:, 0]
    alive = torch.ones(rounds, dtype=torch.bool)
    for i in range(depth):
        token = torch.multinomial(q[state], 1, generator=generator)[:, 0]
        coin = torch.rand(rounds, generator=generator, dtype=torch.float64)
        alive &= coin * q[state, token] < p[state, token]
        counts[i] = float(alive.double().mean())
        state = token
    return counts


def test_survival_equals_simulated_rounds() -> None:
    """Weights on the target's own text give the chances of real rounds, within sampling error."""
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.randn(6, 6, generator=generator).mul(1.5).softmax(-1).double() for _ in range(2))
    played = simulated_survival(p, q, 200_000, 4)
    state = torch.randint(6, (400,), generator=generator)
    states, drawn = [], []
    for step in range(530):
        token = torch.multinomial(p[state], 1, generator=generator)[:, 0]
        if step >= 30:
            states.append(state)
            drawn.append(token)
        state = token
    at, chosen = torch.stack(states, 1), torch.stack(drawn, 1)
    accepted = torch.minimum(p, q).sum(-1)[at]
    kept = (q[at, chosen] / p[at, chosen]).clamp(max=1)
    left = torch.arange(500, 0, -1).expand(400, -1)
    assert survival(accepted, kept, left, 4).tolist() == pytest.approx(played, abs=0.005)


def test_a_model_is_its_own_best_draft(pair: tuple[Path, Path]) -> None:
    """Target against itself: acceptance, agreement and every rate are 1."""
    target, _ = pair
    result = measure(Request(target, target, ["say 1", "say 2"], num_tokens=96, free_rows=2))
    assert [(table.text, table.temperature) for table in result.tables] == [
        ("answers", 1.0), ("answers", 0.7), ("unprompted", 1.0), ("unprompted", 0.7),
    ]  # fmt: skip
    for table in result.tables:
        assert table.acceptance == pytest.approx(1, abs=1e-5)
        assert table.agreement == 1
        assert table.rates == pytest.approx([1] * 8, abs=1e-4)
        assert table.tokens_per_round[4] == pytest.approx(5, abs=1e-3)
    assert result.cost_ratio == 1


def test_tables_agree_with_each_other(pair: tuple[Path, Path]) -> None:
    """Rates multiply to survival, E[N] follows from them, depths average to the whole."""
    target, draft = pair
    result = measure(Request(target, draft, ["say 1", "say 2"], (1.0,), num_tokens=96))
    (table,) = result.tables
    assert 0 < table.acceptance < 1
    assert table.rates[0] * table.rates[1] == pytest.approx(table.survival[1])
    assert table.rates[0] == pytest.approx(table.acceptance)
    assert table.tokens_per_round[3] == pytest.approx(expected_tokens(table.rates[:3]))
    low, high = min(table.by_depth.values()), max(table.by_depth.values())
    assert low <= table.acceptance <= high
    assert 0 < result.cost_ratio < 1


def run_cli(arguments: Sequence[str | Path]) -> str:
    result = CliRunner().invoke(app, ["acceptance", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_tables_and_writes_a_plot(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Tables on standard output, the same as a file, JSON, and a plot that is valid XML."""
    target, draft = pair
    flags = ["--target", target, "--draft", draft, "--prompts", prompt_file(tmp_path, 3),
             "--num-tokens", "96", "--temperatures", "1", "--max-prompts", "2"]  # fmt: skip
    printed = run_cli([*flags, "--out", tmp_path / "out"])
    assert (tmp_path / "out" / "acceptance.md").read_text() in printed
    record = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert json.loads(run_cli([*flags, "--json"])) == record
    shape = f"{record['tables'][0]['acceptance']:.3f}"
    assert shape in printed
    tree = ElementTree.fromstring((tmp_path / "out" / "acceptance.svg").read_text())
    lines = [each for each in tree.iter() if each.tag.endswith("polyline")]
    assert len(lines[0].attrib["points"].split()) == 9


def test_reports_name_every_table(pair: tuple[Path, Path]) -> None:
    """Text and picture show each temperature."""
    target, draft = pair
    result = measure(Request(target, draft, ["say 1"], (1.0, 0.5), num_tokens=64))
    assert "| answers | 0.5 |" in markdown(result)
    assert "answers, T = 0.5" in svg(result)


def test_pairs_and_requests_that_cannot_be_measured(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Another vocabulary, temperatures out of range, no room for an answer, nothing to measure."""
    target, draft = pair
    other = tiny_target(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<s>"', '"<t>"'))
    with pytest.raises(ModelMismatch, match="vocabulary hash"):
        measure(Request(target, other, ["x"], num_tokens=64))
    for changes, message in (
        ({"temperatures": (0.0,)}, "temperatures"),
        ({"num_tokens": 8}, "num_tokens"),
        ({"num_tokens": 4096}, "num_tokens"),
        ({"prompts": ["x" * 80]}, "num_tokens: no prompt leaves room"),
        ({"prompts": []}, "prompts"),
    ):
        fields = {"prompts": ["x"], "num_tokens": 64, **changes}
        with pytest.raises(ConfigError, match=message):
            measure(Request(target, draft, **fields))  # type: ignore[arg-type]
