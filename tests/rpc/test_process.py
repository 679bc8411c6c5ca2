"""A service process from bind to exit: loads a real model, says when it is ready, drains, stops."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service import __main__ as draft_main
from protos.specmesh.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    session_pb2,
    target_pb2,
    target_pb2_grpc,
)
from specmesh import rpc, tls, wire, wire_errors
from specmesh.config import DraftSettings, ServerSettings, TargetSettings, TlsSettings
from specmesh.engine import serving
from specmesh.engine.decoder import Decoder, StepBatch, load_decoder
from specmesh.errors import ConfigError, InternalError, NotReady, PermissionDenied
from specmesh.shaping import TokenShaper
from target_service import __main__ as target_main
from tests.e2e.tiny_pair import write_pair
from tests.rpc import peers
from tests.rpc.peers import AT_COORDINATOR, LIMITS, Peer, Script, reason

PROMPT = [72, 101, 108, 108, 111, 32, 116, 104, 101, 114, 101]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


# How long the service polls: unset, it does not on a CPU; set, the engine runs on its loop.
BUSY_POLL_MS = pytest.mark.parametrize("busy_poll_ms", [None, 0.001, 20.0])


def settings_of(cls, folder: Path, busy_poll_ms: float | None = None, **server):
    engine = {
        "model": folder,
        "page_size": 16,
        "num_pages": 64,
        "num_threads": 1,
        "busy_poll_ms": busy_poll_ms,
    }
    return cls(engine=engine, server=ServerSettings(**{"port": 0, "drain_grace_s": 20, **server}))


async def started(settings, side) -> tuple[serving.ServiceProcess, asyncio.Task[None]]:
    """Run a service in this process until it is ready."""
    process = serving.ServiceProcess(settings, side)
    running = asyncio.create_task(process.run())
    ready = asyncio.create_task(process.ready.wait())
    await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if running.done():
        await running  # raises what kept it from starting
    return process, running


async def health(channel) -> dict[str, int]:
    stub = health_pb2_grpc.HealthStub(channel)
    names = (rpc.READINESS, rpc.LIVENESS)
    requests = {name: health_pb2.HealthCheckRequest(service=name) for name in names}
    return {name: (await stub.Check(request)).status for name, request in requests.items()}


@BUSY_POLL_MS
async def test_a_signal_drains_and_ends_the_process(pair, busy_poll_ms: float | None) -> None:
    """SIGTERM: not ready, no new sessions, the running one finishes, run() returns."""
    target, _ = pair
    settings = settings_of(TargetSettings, target, busy_poll_ms)
    process, running = await started(settings, target_main.side_of(settings))
    has_thread = "target-engine" in [thread.name for thread in threading.enumerate()]
    assert has_thread == (busy_poll_ms is None)
    serving_status = health_pb2.HealthCheckResponse
    async with rpc.create_channel(f"127.0.0.1:{process.port}", LIMITS) as channel:
        up = serving_status.SERVING
        assert await health(channel) == {rpc.READINESS: up, rpc.LIVENESS: up}
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = (await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())).info
        assert (info.page_size, info.total_pages) == (16, 64)
        assert info.device == info.device_id.split(":")[0] == "cpu"
        assert info.max_context_len == 512
        assert len(info.fingerprint) == 64
        link = Peer("target", channel)
        script = Script("target", "s", list(PROMPT))
        opening = script.open(vocab_hash=info.vocab_hash)
        await link.call(opening)
        script.committed((await link.call(script.verify())).verdict.tokens)
        os.kill(os.getpid(), signal.SIGTERM)
        while not link.frames[-1].load.draining:
            link.frames.append(await link.stream.read())
        assert (await health(channel))[rpc.READINESS] == serving_status.NOT_SERVING
        late = Script("target", "late", list(PROMPT))
        assert reason(await link.call(late.open(vocab_hash=info.vocab_hash))) == "NOT_READY"
        assert len((await link.call(script.verify(steps=5))).verdict.tokens) == 5
        assert not running.done()
        await link.call(script.close())
        assert await link.stream.read() is grpc.aio.EOF
    await running


async def test_a_session_that_does_not_end_is_cut_off_after_the_grace(pair) -> None:
    """The grace bounds the drain: the open link ends and run() returns all the same."""
    settings = settings_of(TargetSettings, pair[0], drain_grace_s=0.05)
    process, running = await started(settings, target_main.side_of(settings))
    async with rpc.create_channel(f"127.0.0.1:{process.port}", LIMITS) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = (await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())).info
        link = Peer("target", channel)
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open(vocab_hash=info.vocab_hash))
        process.stop()
        while await link.stream.read() is not grpc.aio.EOF:
            pass
    await running


@BUSY_POLL_MS
async def test_a_lost_device_ends_the_process_with_a_fault(
    pair, monkeypatch, busy_poll_ms: float | None
) -> None:
    """The accelerator's own error: links end with NOT_READY, run() raises, so status 1."""
    settings = settings_of(TargetSettings, pair[0], busy_poll_ms)
    process, running = await started(settings, target_main.side_of(settings))

    def lost(self, batch, cache):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    async with rpc.create_channel(f"127.0.0.1:{process.port}", LIMITS) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = (await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())).info
        link = Peer("target", channel)
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open(vocab_hash=info.vocab_hash))
        monkeypatch.setattr(Decoder, "forward", lost)
        await link.send(script.verify())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.stream.read()
        assert type(wire_errors.error_from_rpc(caught.value)) is NotReady
    with pytest.raises(InternalError):
        await running


async def test_a_real_decoder_behind_the_services_equals_a_cold_pass(pair) -> None:
    """Both services over tiny Llamas: rows after several rounds are those of one cold pass."""
    target_settings = settings_of(TargetSettings, pair[0])
    draft_settings = settings_of(DraftSettings, pair[1])
    target, target_task = await started(target_settings, target_main.side_of(target_settings))
    draft, draft_task = await started(draft_settings, draft_main.side_of(draft_settings))
    decoder = load_decoder(pair[0])
    async with (
        rpc.create_channel(f"127.0.0.1:{target.port}", LIMITS) as target_channel,
        rpc.create_channel(f"127.0.0.1:{draft.port}", LIMITS) as draft_channel,
    ):
        stub = draft_pb2_grpc.DraftServiceStub(draft_channel)
        info = (await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())).info
        target_link, draft_link = Peer("target", target_channel), Peer("draft", draft_channel)
        verifying = Script("target", "s", list(PROMPT), max_len=200, prompt_len=len(PROMPT))
        drafting = Script("draft", "s", list(PROMPT), max_len=200, prompt_len=len(PROMPT))
        await target_link.call(verifying.open(vocab_hash=info.vocab_hash))
        await draft_link.call(drafting.open(vocab_hash=info.vocab_hash))
        verifying.committed((await target_link.call(verifying.verify())).verdict.tokens)
        kept = 0
        for k in (4, 1, 8, 3, 0, 5):
            drafting.tokens = list(verifying.tokens)
            candidates, rows = (), ()
            if k:
                proposal = (await draft_link.call(drafting.propose(k, kept))).proposal
                candidates, rows = proposal.tokens, proposal.distributions
            answer = await target_link.call(verifying.verify(candidates, rows))
            assert reason(answer) == ""
            assert not answer.verdict.HasField("redraw_mismatch")
            kept = answer.verdict.num_accepted if k else kept
            verifying.committed(answer.verdict.tokens)
        answer = await target_link.call(
            verifying.verify([1], [one_hot(info.vocab_size)], decide_at=AT_COORDINATOR)
        )
        tokens = [*verifying.tokens, 1]
        expected = cold_rows(decoder, tokens, len(PROMPT), verifying.params)
        for message, row in zip(answer.verdict.distributions, expected[-2:], strict=True):
            torch.testing.assert_close(
                wire.decode(message, info.vocab_size).dense(), row, rtol=1e-4, atol=1e-6
            )
    for process, running in ((target, target_task), (draft, draft_task)):
        process.stop()
        await running


def one_hot(vocab_size: int) -> session_pb2.Distribution:
    row = wire.Row(vocab_size, torch.tensor([1.0]), torch.tensor([1]), wire.SPARSE_F32)
    return wire.encode(row)


def cold_rows(decoder, tokens, prompt_len, params) -> list[torch.Tensor]:
    """Shaped rows after every token of one uncached pass."""
    batch = StepBatch.pack([tokens], [0], [list(range(16))], range(len(tokens)), page_size=16)
    logits = decoder.forward(batch, decoder.new_cache(16, page_size=16))
    shaper = TokenShaper(params, decoder.spec.vocab_size, prompt_len)
    return [shaper.row(row, tokens[: i + 1]) for i, row in enumerate(logits)]


@pytest.mark.parametrize("k", range(1, 9))
async def test_one_real_model_on_both_sides_is_always_accepted(pair, k) -> None:
    """Draft = target on dense float32 rows through a real decoder: every candidate kept."""
    decoder = load_decoder(pair[0])
    cache = {"cache": decoder.new_cache(64, 16), "page_size": 16}
    async with (
        peers.running("target", decoder, peers.Setup(**cache)) as target,
        peers.running(
            "draft", decoder, peers.Setup(cache=decoder.new_cache(64, 16), page_size=16)
        ) as draft,
        peers.linked(target) as target_link,
        peers.linked(draft) as draft_link,
    ):
        verifying = Script("target", "s", list(PROMPT), max_len=200)
        drafting = Script("draft", "s", list(PROMPT), max_len=200)
        await target_link.call(verifying.open())
        await draft_link.call(drafting.open())
        verifying.committed((await target_link.call(verifying.verify())).verdict.tokens)
        kept = 0
        for _ in range(4):
            drafting.tokens = list(verifying.tokens)
            proposal = (await draft_link.call(drafting.propose(k, kept))).proposal
            command = verifying.verify(proposal.tokens, proposal.distributions)
            verdict = (await target_link.call(command)).verdict
            kept = verdict.num_accepted
            assert kept == k
            verifying.committed(verdict.tokens)


async def test_what_cannot_start_says_why(pair, tmp_path) -> None:
    """A missing folder, a context beyond the model's, a taken port: ConfigError naming it."""
    target, _ = pair
    missing = settings_of(TargetSettings, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        await started(missing, target_main.side_of(missing))
    engine = {"model": target, "max_context_len": 10_000}
    too_long = TargetSettings(engine=engine, server=ServerSettings(port=0))
    with pytest.raises(ConfigError, match="max_context_len"):
        await started(too_long, target_main.side_of(too_long))
    good = settings_of(TargetSettings, target)
    process, running = await started(good, target_main.side_of(good))
    taken = TargetSettings(engine={"model": target}, server=ServerSettings(port=process.port))
    with pytest.raises(ConfigError, match=str(process.port)):
        await started(taken, target_main.side_of(taken))
    process.stop()
    await running


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory) -> dict[str, TlsSettings]:
    """An authority and two identities that it signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(("openssl", *arguments), cwd=folder, check=True, capture_output=True)

    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(*new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    found = {}
    for name in ("server", "coordinator", "stranger"):
        names = f"URI:spiffe://specmesh/{name},DNS:localhost,IP:127.0.0.1"
        openssl(
            *new,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            f"/CN={name}",
            "-days",
            "2",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-addext",
            f"subjectAltName={names}",
        )
        found[name] = TlsSettings(
            certificate=folder / f"{name}.pem",
            private_key=folder / f"{name}.key",
            authority=folder / "ca.pem",
            allowed_peers=("spiffe://specmesh/coordinator",),
        )
    return found


async def test_mutual_tls_lets_in_named_peers_only(pair, tls_files) -> None:
    """With TLS: the coordinator's identity is served, another is denied, plaintext fails; health
    answers in plaintext on its own port."""
    settings = settings_of(TargetSettings, pair[0], tls=tls_files["server"], health_port=0)
    process, running = await started(settings, target_main.side_of(settings))
    request = target_pb2.TargetServiceGetInfoRequest()

    async def call(credentials):
        async with rpc.create_channel(f"localhost:{process.port}", LIMITS, credentials) as channel:
            return await target_pb2_grpc.TargetServiceStub(channel).GetInfo(request, timeout=10)

    assert (await call(tls.channel_credentials(tls_files["coordinator"]))).info.page_size == 16
    with pytest.raises(grpc.aio.AioRpcError) as denied:
        await call(tls.channel_credentials(tls_files["stranger"]))
    assert type(wire_errors.error_from_rpc(denied.value)) is PermissionDenied
    with pytest.raises(grpc.aio.AioRpcError) as plain:
        await call(None)
    assert plain.value.code() is grpc.StatusCode.UNAVAILABLE
    async with rpc.create_channel(f"127.0.0.1:{process.health_port}", LIMITS) as channel:
        assert (await health(channel))[rpc.READINESS] == health_pb2.HealthCheckResponse.SERVING
    process.stop()
    await running


def test_a_bad_setting_is_one_line_and_status_two(capsys, tmp_path) -> None:
    """`main` of both services returns 2 and names the setting; no traceback."""
    for module in (draft_main, target_main):
        assert module.main(["--engine.model", str(tmp_path), "--engine.page-size", "7"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "engine.page_size" in line


def test_print_config_shows_what_was_resolved(capsys, tmp_path) -> None:
    """--print-config prints every setting as JSON and exits with 0."""
    with pytest.raises(SystemExit) as ended:
        target_main.main(["--engine.model", str(tmp_path), "--print-config"])
    assert ended.value.code == 0
    assert '"redraw_check_ratio": 0.05' in capsys.readouterr().out
