"""Ports for servers that start later: nobody is given one who does not ask for it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from specmesh import ports
from specmesh.errors import ConfigError


@pytest.fixture
def system_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which ports the system gives out by itself."""
    path = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "SYSTEM_RANGE", path)
    return path


def test_the_system_never_gives_such_a_port_to_another() -> None:
    """All lie outside the range that connections and servers on port 0 are given from, and no two
    are the same. One of the system's own could be taken before its server has bound it."""
    first, last = ports.system_range()
    given = [ports.unused_port() for _ in range(300)]
    assert len(set(given)) == 300
    assert not [port for port in given if first <= port <= last]
    assert min(given) >= ports.FIRST_PORT


def test_a_port_with_a_listener_is_not_given(
    system_range: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 ports outside the system's range one has a listener and the others have been given:
    the search ends with an error that says where it looked."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports.unused_port()))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST_PORT", taken)
        system_range.write_text(f"{taken + 200} {ports.MAX_PORT}\n")
        monkeypatch.setattr(ports, "_given", set(range(taken + 1, taken + 200)))
        with pytest.raises(ConfigError, match=f"outside {taken + 200} to 65535"):
            ports.unused_port()
    assert ports.unused_port() == taken


@pytest.mark.parametrize(
    ("content", "expected"),
    [("1024 65535\n", (1024, 65535)), ("", ports.IANA_DYNAMIC), (None, ports.IANA_DYNAMIC)],
)
def test_what_the_system_says_of_its_range(
    system_range: Path, content: str | None, expected: tuple[int, int]
) -> None:
    """Its file is read; without one the dynamic ports of the standard are left alone. Where the
    system gives out nearly all ports, its own choice is taken."""
    if content is not None:
        system_range.write_text(content)
    assert ports.system_range() == expected
    assert ports.unused_port() > 0
