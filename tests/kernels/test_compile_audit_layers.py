"""The shipped sampling and layer launches compile for sm_90 into the instructions meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from kernels import linear
from kernels.configs import layers
from kernels.configs.layers import LinearTiles, linear_kind, linear_tiles
from kernels.linear_specialised import REGISTERS, fits_multiprocessor, shared_bytes
from tests.kernels.audit_layers import (
    SMALL,
    SPECIALISED,
    linear_launches,
    persistent_launches,
    specialised_launches,
    specialised_products,
)

NAMES = (
    "judge", "close", "draw", "groups", "threshold", "penalize", "survey", "keep", "redraw",
    "report", "linear-swiglu", "linear-none", "linear-fp8-swiglu", "linear-fp8-none", "other-fp8",
    "specialised", "persistent", "finish", "end-norm", "norm", "rope",
)  # fmt: skip


def test_every_launch_of_the_table_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's general tiles, by kind of weight as chunks and ends differ, since every product
    may come to them; and the launches of other kernels that a row names."""
    chosen: list[tuple[str, LinearTiles]] = []

    def tiles_of(x: Tensor, weight: Tensor, swiglu: bool) -> LinearTiles:
        tiles, kind = linear_tiles(x, weight, swiglu), linear_kind(weight, swiglu)
        chosen.append((kind if weight.dtype is x.dtype else f"fp8 {kind}", tiles))
        return tiles

    def general(tiles: LinearTiles) -> LinearTiles:
        return replace(tiles, specialised=None, persistent=None)

    monkeypatch.setattr(linear, "linear_tiles", tiles_of)
    table = [(kind, tiles) for (_, kind), rows in layers._LINEAR.items() for _, tiles in rows]
    assert len(list(linear_launches())) > len(table)
    assert {(kind, general(tiles)) for kind, tiles in table} <= {
        (kind, general(tiles)) for kind, tiles in chosen
    }
    plain = [(kind, tiles) for kind, tiles in table if not kind.startswith("fp8")]
    for launches, name in (
        (specialised_launches, "specialised"),
        (persistent_launches, "persistent"),
    ):
        chosen.clear()
        assert list(launches())
        asked = {(kind, own) for kind, tiles in plain if (own := getattr(tiles, name)) is not None}
        assert asked == {(kind, getattr(tiles, name)) for kind, tiles in chosen}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-m", "tests.kernels.audit_layers"],
        env=environment, capture_output=True, text=True, check=True, timeout=500,
    ).stdout  # fmt: skip
    return [json.loads(line) for line in output.splitlines()]


def test_linear_layers_use_one_family_of_tensor_cores_and_asynchronous_copies(
    reports: list[dict[str, Any]],
) -> None:
    """Every linear launch, whatever its rows and bytes a weight, multiplies by wgmma alone: one
    family, one set of bits; and its tiles arrive by asynchronous or bulk copies."""
    kinds = ("linear", "specialised", "persistent")
    linears = [report for report in reports if report["name"].startswith(kinds)]
    assert len(linears) == 25 + 25 + len(SPECIALISED) + len(SMALL) + 5
    for report in linears:
        assert report["wgmma"] > 0, report
        assert report["mma"] == 0, report
        assert report["async_copies"] > 0, report


def test_specialised_tiles_share_a_multiprocessor_as_they_say(
    reports: list[dict[str, Any]],
) -> None:
    """Programs that are to run at once have registers and memory there, and the memory reckoned
    with is no less than what the compiler takes."""
    specialised = [report for report in reports if report["name"].startswith("specialised")]
    of_the_table = [(own, False) for _, _, own in specialised_products()]
    small = [(own, end == "swiglu") for own, _, _, end in SMALL]
    for report, (own, swiglu) in zip(specialised, of_the_table + small, strict=True):
        assert report["name"].endswith(str(own))
        assert own.at_once * 128 * (own.groups + 1) * report["registers"] <= REGISTERS, report
        assert report["shared_bytes"] <= shared_bytes(own, swiglu), report
        assert fits_multiprocessor(own, swiglu), report


def test_one_byte_weights_become_bfloat16_by_the_fast_way(reports: list[dict[str, Any]]) -> None:
    """No conversion of a single value, which a multiprocessor does 16 of a cycle: fewer than the
    weights that arrive meanwhile. None of the whole table's kernels for bfloat16."""
    fp8 = [report for report in reports if report["name"].startswith("linear-fp8")]
    assert fp8
    for report in fp8:
        assert report["slow_conversions"] == 0, report


# Capped so that more of their warps fit a multiprocessor: they may put that many bytes aside, but
# only where no innermost loop runs (a tile of a coupled row; around a round of the closing race).
MAY_SPILL = {"judge": 8, "close-logits-torch.float32": 8}


def test_no_kernel_spills(reports: list[dict[str, Any]]) -> None:
    """No local memory in any innermost loop, and none at all but where a cap is worth it."""
    for name in NAMES:
        assert any(report["name"].startswith(name) for report in reports), name
    for report in reports:
        assert report["spills_in_any_loop"] == 0, report
        allowed = [MAY_SPILL[name] for name in MAY_SPILL if report["name"].startswith(name)]
        assert report["stack_bytes"] <= max(allowed, default=0), report


def test_every_kernel_fits_a_multiprocessor(reports: list[dict[str, Any]]) -> None:
    """Shared memory stays within the 227 KiB a thread block may take; rows are streamed by at
    least sixteen warps a multiprocessor."""
    for report in reports:
        assert report["shared_bytes"] <= 227 * 1024, report
        if report["name"].startswith(("judge", "close", "groups")):
            assert report["registers"] <= 128, report
