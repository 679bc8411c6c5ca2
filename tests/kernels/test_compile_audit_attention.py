"""The shipped attention configurations compile for sm_90 into the instructions meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

BARS = (
    "forward",
    "specialised",
    "key-value",
    "query",
    "paged-leaf",
    "paged-chunk",
    "paged-prefill",
    "fresh-leaf",
    "fresh-sequence",
)


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-m", "tests.kernels.audit_attention"],
        env=environment, capture_output=True, text=True, check=True, timeout=500,
    ).stdout  # fmt: skip
    return [json.loads(line) for line in output.splitlines()]


def test_every_kernel_uses_tensor_cores_and_asynchronous_copies(
    reports: list[dict[str, Any]],
) -> None:
    """Each kernel holds wgmma products (none fell back to mma.sync) and async or bulk copies."""
    for bar in BARS:
        assert any(report["name"].startswith(bar) for report in reports)
    for report in reports:
        assert report["wgmma"] > 0, report
        assert report["mma"] == 0, report
        assert report["async_copies"] > 0, report


def test_no_kernel_spills_where_it_matters(reports: list[dict[str, Any]]) -> None:
    """No local memory at all, but for paged kernels outside their loops over tiles.

    Those keep a few addresses there; prefill also its state, while it folds a chunk; and steps that
    take tokens from their projection some of what they read ahead.
    """
    for report in reports:
        if not report["name"].startswith(("paged-chunk", "paged-prefill", "fresh")):
            assert report["stack_bytes"] == 0, report
        assert report["spills_in_loops"] <= (4 if "prefill" in report["name"] else 0), report


def test_every_kernel_fits_a_multiprocessor(reports: list[dict[str, Any]]) -> None:
    """Shared memory stays within the 227 KiB a thread block may take, registers within 255."""
    for report in reports:
        assert report["shared_bytes"] <= 227 * 1024, report
        assert report["registers"] <= 255, report
