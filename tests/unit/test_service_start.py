"""What a service's settings can tell is told in one line, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draft_service.__main__ import main as draft_main
from target_service.__main__ import main as target_main


@pytest.mark.parametrize("main", [draft_main, target_main])
def test_a_name_that_is_no_device_is_named(
    main: Callable[[list[str]], int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and the setting's name, where there was a traceback of torch."""
    assert main(["--engine.model", str(tmp_path), "--engine.device", "gpu"]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert "engine.device" in last
    assert "cpu, cuda or cuda:N" in last
