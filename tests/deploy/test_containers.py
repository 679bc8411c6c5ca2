"""The manifests' containers as local processes: probed, asked, renewed, terminated."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from protos.specmesh.v1 import target_pb2, target_pb2_grpc
from specmesh.client import AsyncClient, Chunk, GenerateOptions
from specmesh.engine.weight_check import seal
from specmesh.errors import PermissionDenied, Unauthenticated
from specmesh.rpc import RpcLimits, create_channel
from specmesh.wire_errors import error_from_rpc
from tests.deploy.certificates import issue, issue_all, make_authority
from tests.deploy.containers import (
    Node,
    Running,
    init_container,
    run_command,
    run_once,
    running,
)
from tests.deploy.manifests import overlay, template
from tests.e2e.tiny_pair import write_pair
from tests.telemetry.otlp_receiver import OtlpReceiver

PROMPT = "Once upon a time"
# More bytes than a stream's window holds, so that a reader who pauses keeps it from ending.
TOKENS, SAMPLES = 400, 4
LONG = GenerateOptions(max_tokens=TOKENS, n=SAMPLES, ignore_eos=True, logprobs=10)
KEY = "a-key-of-the-blue-team"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volume: both folders with checksums."""
    volume = tmp_path_factory.mktemp("models")
    for folder in write_pair(volume):
        file = folder / "config.json"
        config = json.loads(file.read_text())
        # As long as the manifests say, which is beyond what the pair was made for.
        file.write_text(json.dumps({**config, "max_position_embeddings": 2048}))
        seal(folder)
    return volume


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


class Reading:
    """A long answer that pauses once every sample is under way, until it is told to go on."""

    def __init__(self, client: AsyncClient) -> None:
        self.is_under_way, self.goes_on = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> list[int]:
        lengths = [0] * SAMPLES
        async for event in client.stream(PROMPT, LONG):
            if isinstance(event, Chunk):
                lengths[event.index] += len(event.token_ids)
                if all(lengths) and not self.is_under_way.is_set():
                    self.is_under_way.set()
                    await self.goes_on.wait()
        return lengths

    async def started(self) -> None:
        """Until it pauses; raises what ends it before."""
        waiting = asyncio.ensure_future(self.is_under_way.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await self._task

    async def rest(self) -> list[int]:
        """Read on to the end; the number of tokens of each sample."""
        self.goes_on.set()
        return await self._task


async def test_pods_with_mutual_tls_and_keys(
    models: Path, tmp_path: Path, collector: OtlpReceiver
) -> None:
    """`plain` with mtls and api-keys: probes in plaintext, an answer over TLS, only the coordinator
    may open links, a renewed certificate is served at once, and on SIGTERM to all three at once
    what runs is finished and every process exits with 0."""
    objects = overlay("plain", ("api-keys", "mtls"))
    make_authority(tmp_path)
    secrets = issue_all(tmp_path, objects)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "api-keys").write_text(f"blue:{KEY} max_running=8\n")
    pods: dict[str, Running] = {}
    ports: dict[int, int] = {}
    async with AsyncExitStack() as exits:
        for name in ("target", "draft", "coordinator"):
            folders = {
                "/models": models,
                "/tmp": tmp_path,
                "/etc/specmesh/tls": secrets[name],
                "/etc/specmesh/api-keys": keys,
            }
            node = Node(objects, folders, collector.port, ports)
            pods[name] = await exits.enter_async_context(
                running(node, template(objects, name), tmp_path)
            )
        step = init_container(objects, "target")
        code, output = await run_once(pods["target"].node, step, tmp_path)
        assert (code, output) == (0, f"{models}/target: check ok\n")
        for pod in pods.values():
            await pod.starts()
            await pod.passes("readinessProbe")
            assert await pod.probe("livenessProbe")
        client = await exits.enter_async_context(client_of(ports[50051], secrets["client"]))
        answer = await client.generate(PROMPT, GenerateOptions(max_tokens=16, ignore_eos=True))
        assert len(answer.token_ids[0]) == 16
        stranger = await exits.enter_async_context(
            client_of(ports[50051], secrets["client"], key="another-key-of-no-team")
        )
        with pytest.raises(Unauthenticated):
            await stranger.generate(PROMPT, GenerateOptions(max_tokens=1))
        await only_the_coordinator_may_call(ports[50071], secrets)
        before = await asyncio.to_thread(served, ports[50071], secrets["coordinator"])
        issue(tmp_path, objects, "target")
        after = await asyncio.to_thread(served, ports[50071], secrets["coordinator"])
        assert before != after
        assert after == ssl.PEM_cert_to_DER_cert((secrets["target"] / "tls.crt").read_text())
        assert tokens_counted(ports[9451]) == 16
        await finish_what_runs(pods, client)
    services = {one.service for one in collector.by_trace(answer.started.trace_id)}
    assert services == {"specmesh-coordinator", "specmesh-draft", "specmesh-target"}
    assert KEY not in "".join(pod.log.read_text() for pod in pods.values())


def client_of(port: int, secret: Path, key: str = KEY) -> AsyncClient:
    credentials = grpc.ssl_channel_credentials(
        *((secret / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    )
    return AsyncClient(f"localhost:{port}", api_key=key, credentials=credentials)


async def only_the_coordinator_may_call(port: int, secrets: dict[str, Path]) -> None:
    """The target answers the coordinator's identity; the draft's and the client's are denied."""
    request = target_pb2.TargetServiceGetInfoRequest()
    for name, secret in secrets.items():
        credentials = grpc.ssl_channel_credentials(
            *((secret / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt"))
        )
        if name in ("target", "draft"):
            continue  # no certificates for calling: "server auth" only
        async with create_channel(f"localhost:{port}", RpcLimits(), credentials) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            if name == "coordinator":
                await stub.GetInfo(request, timeout=10)
                continue
            with pytest.raises(grpc.aio.AioRpcError) as denied:
                await stub.GetInfo(request, timeout=10)
            assert type(error_from_rpc(denied.value)) is PermissionDenied


def served(port: int, secret: Path) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(secret / "ca.crt"))
    context.load_cert_chain(secret / "tls.crt", secret / "tls.key")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        found = secured.getpeercert(binary_form=True)
    assert found is not None
    return found


def tokens_counted(port: int) -> float:
    """What Prometheus would read of the coordinator's output tokens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (each for each in lines if each.startswith("specmesh_output_tokens_total "))
    return float(line.split()[1])


async def finish_what_runs(pods: dict[str, Running], client: AsyncClient) -> None:
    """SIGTERM to every pod while an answer streams: it comes whole, and every process ends well."""
    reading = Reading(client)
    await reading.started()
    for pod in pods.values():
        pod.terminate()
    await pods["coordinator"].passes("readinessProbe", wanted=False)
    assert await reading.rest() == [TOKENS] * SAMPLES
    grace_s = template(pods["coordinator"].node.objects, "coordinator").pod[
        "terminationGracePeriodSeconds"
    ]
    for pod in pods.values():
        assert await pod.ends(grace_s) == 0, pod.tail()


# ---------------------------------------------------------------- with Ray

# KubeRay's part: starts Ray with the slot that a worker pod offers and hands in the Serve config.
OPERATOR = """
import sys
from pathlib import Path
import yaml
from coordinator.app import start_ray
from specmesh.config import RaySettings
start_ray(RaySettings(temp_dir=Path(sys.argv[1])))
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
config = ServeDeploySchema.model_validate(yaml.safe_load(sys.argv[2]))
serve.start(proxy_location=config.proxy_location)
_get_global_client().deploy_apps(config)
import signal
signal.pause()
"""


@pytest.fixture
async def short_folder() -> AsyncIterator[Path]:
    """Ray keeps sockets in it, whose paths have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="sm-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


async def test_the_serve_config_makes_a_coordinator_that_drains(
    models: Path, tmp_path: Path, short_folder: Path, collector: OtlpReceiver
) -> None:
    """`local-cpu`: the Serve config, built from the worker's environment by Ray, gives a replica
    that passes its probes and serves; the preStop hook lets what runs finish before it returns."""
    objects = overlay("local-cpu")
    service = next(each for each in objects if each["kind"] == "RayService")
    node = Node(objects, {"/models": models, "/tmp": tmp_path}, collector.port)
    worker = template(objects, "coordinator")
    command = ["python", "-c", OPERATOR, str(short_folder), service["spec"]["serveConfigV2"]]
    async with AsyncExitStack() as exits:
        pods = {
            name: await exits.enter_async_context(running(node, template(objects, name), tmp_path))
            for name in ("target", "draft")
        }
        pod = await exits.enter_async_context(running(node, worker, tmp_path, command))
        await pod.starts()
        await pod.passes("readinessProbe")
        client = await exits.enter_async_context(AsyncClient(f"127.0.0.1:{node.port(50051)}"))
        reading = Reading(client)
        await reading.started()
        hook = pod.container["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[-2:] == ["--notice-s", "5"]
        draining = asyncio.create_task(
            run_command([*hook[:-1], "0"], node, pod.container, tmp_path)
        )
        await pod.passes("readinessProbe", wanted=False)
        assert await reading.rest() == [TOKENS] * SAMPLES
        code, output = await draining
        assert (code, output) == (0, "")
        for each in pods.values():
            each.terminate()
        for each in pods.values():
            assert await each.ends(60) == 0, each.tail()
