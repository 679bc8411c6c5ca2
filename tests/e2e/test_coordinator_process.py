"""`python -m coordinator` as a process, with and without Ray: ready, serving, drained, codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from specmesh.client import AsyncClient, Chunk, GenerateOptions
from specmesh.ports import unused_port
from specmesh.rpc import READINESS, RpcLimits, create_channel
from specmesh.tokenizer import load_tokenizer
from tests.e2e.stack import VOCAB_SIZE, model_info
from tests.rpc import peers
from tests.rpc.fake_model import PrefixDecoder

PROMPT = [1, 2, 3]
START_S = 120.0  # Ray takes seconds to start, on a busy machine many
END_S = 60.0


def make_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer of VOCAB_SIZE letters; return its vocabulary hash."""
    letters = {chr(ord("a") + index): index for index in range(VOCAB_SIZE)}
    backend = FastTokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder).vocab_hash


@asynccontextmanager
async def services(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **draft: Any
) -> AsyncIterator[list[str]]:
    """A target and a draft of this process; yields the coordinator's flags for them."""
    vocab_hash = make_tokenizer(folder)
    monkeypatch.setattr(peers, "VOCAB_HASH", vocab_hash)
    async with (
        peers.running("target", PrefixDecoder(VOCAB_SIZE)) as target,
        peers.running("draft", PrefixDecoder(VOCAB_SIZE, seed=1)) as drafting,
    ):
        target.state.set_ready(model_info(target, "a"), target.links)
        drafting.state.set_ready(model_info(drafting, "b", **draft), drafting.links)
        yield [
            *("--tokenizer", str(folder)),
            *("--targets", target.address),
            *("--drafts", drafting.address),
        ]


@asynccontextmanager
async def coordinator(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process; whatever happens it is ended, with everything that it started."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "coordinator",
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def wait_ready(address: str, process: asyncio.subprocess.Process) -> None:
    """Until grpc.health.v1 says SERVING; fails when the process ends first."""
    channel = create_channel(address, RpcLimits())
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=READINESS)
    try:
        async with asyncio.timeout(START_S):
            while True:
                if process.returncode is not None:
                    output, _ = await process.communicate()
                    raise AssertionError(f"the coordinator ended: {output.decode()[-2000:]}")
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.Check(request, timeout=1.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.05)
    finally:
        await channel.close()


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A folder with a short name: Ray keeps sockets in it, whose paths have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="sm-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.parametrize("mode", ["plain", "ray"])
async def test_serves_and_drains(
    mode: str, tmp_path: Path, ray_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the middle of a stream: every token still arrives, then the process exits with 0
    and leaves nothing behind. The same with Ray around the replica."""
    port = unused_port()
    ray_flags = ["--no-ray"] if mode == "plain" else []
    async with services(tmp_path / "tokenizer", monkeypatch) as flags:
        own = ["--server.port", str(port), "--ray.temp-dir", ray_folder]
        async with coordinator(*flags, *own, *ray_flags) as process:
            address = f"127.0.0.1:{port}"
            await wait_ready(address, process)
            options = GenerateOptions(seed=3, max_tokens=60, ignore_eos=True, num_draft_tokens=2)
            async with AsyncClient(address) as client:
                wanted = (await client.generate(PROMPT, options)).token_ids[0]
                found: list[int] = []
                async for event in client.stream(PROMPT, options):
                    if isinstance(event, Chunk):
                        if not found:
                            process.send_signal(signal.SIGTERM)
                        found.extend(event.token_ids)
            assert len(wanted) == 60
            assert found == wanted
            async with asyncio.timeout(END_S):
                output, _ = await process.communicate()
            assert process.returncode == 0, output.decode()[-2000:]
            assert b"Traceback" not in output


def flags_to_nowhere(folder: Path, port: int) -> list[str]:
    """Flags of a coordinator on this port, with a tokenizer but no replica that answers."""
    make_tokenizer(folder)
    nowhere = f"127.0.0.1:{unused_port()}"
    replicas = ["--targets", nowhere, "--drafts", nowhere]
    return ["--tokenizer", str(folder), *replicas, "--server.port", str(port)]


async def wait_listening(port: int) -> None:
    """Until the port answers; it must say that it is not ready."""
    channel = create_channel(f"127.0.0.1:{port}", RpcLimits())
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=READINESS)
    answer = await stub.Check(request, timeout=START_S, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await channel.close()


def members(session: int) -> list[str]:
    """Names of the processes of this session that live: what its leader has started and left."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name, _, fields = status.read_text().rpartition(")")
            state, _, _, of_session, *_ = fields.split()
            if int(of_session) == session and state != "Z":
                found.append(name)
    return found


@pytest.mark.parametrize(
    ("mode", "number", "to_all"),
    [
        ("plain", signal.SIGTERM, False),
        ("ray", signal.SIGTERM, False),
        ("plain", signal.SIGINT, True),
        ("ray", signal.SIGINT, True),  # Ctrl-C in a terminal reaches Ray's processes as well
    ],
)
async def test_a_signal_before_any_target_is_there(
    mode: str, number: signal.Signals, to_all: bool, tmp_path: Path, ray_folder: str
) -> None:
    """A coordinator that still waits for its targets listens, is not ready, and ends with 0 when it
    is told to; no process of Ray stays."""
    port = unused_port()
    flags = flags_to_nowhere(tmp_path / "tokenizer", port)
    ray_flags = ["--no-ray"] if mode == "plain" else ["--ray.temp-dir", ray_folder]
    async with coordinator(*flags, *ray_flags) as process:
        await wait_listening(port)
        (os.killpg if to_all else os.kill)(process.pid, number)
        async with asyncio.timeout(END_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-2000:]
        assert b"Traceback" not in output
        assert members(process.pid) == []


async def test_a_pod_drains_before_any_target_is_there(tmp_path: Path, ray_folder: str) -> None:
    """The hook of a pod that is to go returns once the replica has stopped, though no target ever
    came; it would wait for the whole grace."""
    port = unused_port()
    flags = flags_to_nowhere(tmp_path / "tokenizer", port)
    file = Path(ray_folder) / "drain"
    hook_environment = {
        "SPECMESH_COORDINATOR_TOKENIZER": str(tmp_path / "tokenizer"),
        "SPECMESH_COORDINATOR_SERVER__PORT": str(port),
        "SPECMESH_COORDINATOR_RAY__DRAIN_FILE": str(file),
    }
    ray_flags = ["--ray.temp-dir", ray_folder, "--ray.drain-file", str(file)]
    async with coordinator(*flags, *ray_flags) as process:
        await wait_listening(port)
        hook = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coordinator.drain"), env=os.environ | hook_environment
        )
        async with asyncio.timeout(END_S):
            assert await hook.wait() == 0
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-2000:]


@pytest.mark.parametrize("mode", ["plain", "ray"])
async def test_mismatched_draft_is_refused_at_start(
    mode: str, tmp_path: Path, ray_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another vocabulary at the draft: exit code 2 and one line that says what differs."""
    ray_flags = ["--no-ray"] if mode == "plain" else ["--ray.temp-dir", ray_folder]
    port = str(unused_port())
    async with (
        services(tmp_path / "tokenizer", monkeypatch, eos_token_ids=[1]) as flags,
        coordinator(*flags, "--server.port", port, *ray_flags) as process,
        asyncio.timeout(START_S),
    ):
        output, _ = await process.communicate()
    assert process.returncode == 2, output.decode()[-2000:]
    last = output.decode().strip().splitlines()[-1]
    assert last.startswith("coordinator: ")
    assert "eos_token_ids" in last


async def test_configuration_errors_exit_with_2(tmp_path: Path, ray_folder: str) -> None:
    """An unknown flag is named at once. So is what settings and files tell, in one line and before
    anything of Ray starts: no tokenizer, no keys, no certificates, no address."""
    make_tokenizer(tmp_path / "tokenizer")
    good = ["--tokenizer", str(tmp_path / "tokenizer")]
    nothing = str(tmp_path / "nothing")
    tls = [f"{name}={nothing}" for name in ("certificate", "private-key", "authority")]
    wrong = (
        (["--tokenizer", str(tmp_path)], "tokenizer.json"),
        ([*good, "--api-keys", nothing], "api_keys"),
        ([*good, *(f"--server.tls.{each}" for each in tls)], nothing),
        ([*good, *(f"--link-tls.{each}" for each in tls)], nothing),
        ([*good, "--targets", "127.0.0.1"], "targets"),
    )
    for flags, word in (
        ([*good, "--no-such-flag", "1"], "no-such-flag"),
        ([*wrong[0][0], "--no-ray"], wrong[0][1]),
        *wrong,
    ):
        async with coordinator(*flags, "--ray.temp-dir", f"{ray_folder}/ray") as process:
            async with asyncio.timeout(START_S):
                output, _ = await process.communicate()
        assert process.returncode == 2
        lines = output.decode().strip().splitlines()
        assert word in lines[-1]
        assert len(lines) == 1 or word == "no-such-flag"
    assert not Path(ray_folder, "ray").exists()
