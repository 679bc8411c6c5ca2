"""What the step benchmarks measure: the cases asked for."""

from __future__ import annotations

import pytest
import torch

from draft_service.bench_steps import CASES
from specmesh.bench import steps
from target_service import bench_steps as target_steps


def test_cases_are_chosen_by_the_ends_of_their_names() -> None:
    """The b64 variant of a case is another case; nothing asked for is everything."""
    names = [case.name for case in CASES if steps.is_wanted(case, "draft-4layer-k4,draft-1b-k4")]
    assert names == ["draft-4layer-k4", "draft-1b-k4"]
    assert all(steps.is_wanted(case, "") for case in CASES)
    assert not any(steps.is_wanted(case, "b65") for case in CASES)


def test_steps_over_fp8_weights_are_cases_of_their_own(
    monkeypatch: pytest.MonkeyPatch, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same shapes under names that say so, without the bars of two bytes a weight, with the floor
    of one; the vendor's products are refused."""
    plain, fp8 = (target_steps.cases_of("8b", kind) for kind in ("model", "fp8"))
    counts = [(batch, rows) for rows in (1, 5) for batch in (1, 8, 32, 64)]
    assert [case.name for case in fp8] == [f"step-8b-fp8-b{b}x{r}" for b, r in counts]
    assert [case.shape for case in fp8] == [case.shape for case in plain]
    assert all(case.bar_ms is None for case in fp8)
    assert all(case.bar_ms is not None for case in plain)
    with pytest.raises(SystemExit):
        target_steps.main(["--library", "--weight-dtype", "fp8"])
    assert "no fp8 weights" in capsys.readouterr().err
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    monkeypatch.setitem(
        steps.CONFIGS, "8b", {**steps.CONFIGS["8b"], **small, "num_hidden_layers": 2}
    )
    decoders = [
        steps.load("8b", torch.device(device), dtype=torch.float32, weight_dtype=kind)
        for kind in ("model", "fp8")
    ]
    assert decoders[1].weight_dtype == "fp8"
    spec = decoders[1].spec
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shapes = ((qkv, 64), (64, 64), (2 * 96, 64), (64, 96))
    saved = spec.num_layers * sum(3 * rows * depth - 4 * rows for rows, depth in shapes)
    floors = [
        steps.floor_ms(each, case) for each, case in zip(decoders, (plain[0], fp8[0]), strict=True)
    ]
    assert floors[0] - floors[1] == pytest.approx(saved / steps.BANDWIDTH * 1e3)
