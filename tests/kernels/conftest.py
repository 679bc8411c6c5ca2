"""Kernel tests run the Triton code in the interpreter on a CPU and compiled on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any import

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter_speed import quicken

    quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter turns one-element arrays into scalars, which numpy deprecates."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
            )


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
