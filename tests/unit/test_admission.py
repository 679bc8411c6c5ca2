"""Admission, tenants, placement and the output buffer: bounds hold, places come back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.admission import Admission, fewest_running_first
from coordinator.commands import Failed
from coordinator.messages import Deliver, Fail, Finish, FinishReason, Stats
from coordinator.placement import Candidate, choose_draft, choose_target, prefix_key
from coordinator.stream import OutputStream
from coordinator.tenants import DEFAULT_TENANT, NO_LIMITS, TenantLimits, Tenants
from specmesh.config import AdmissionSettings
from specmesh.errors import (
    Cancelled,
    ConfigError,
    NotReady,
    NumericFault,
    SpecmeshError,
    TooBusy,
    Unauthenticated,
)


def admission(**changes: float) -> Admission:
    return Admission(AdmissionSettings(**{"max_running": 2, "max_waiting": 2, **changes}))  # type: ignore[arg-type]  # test fields


async def hold(admitting: Admission, tenant: str, release: asyncio.Event, order: list[str]) -> None:
    async with admitting.admit(tenant, 1):
        order.append(tenant)
        await release.wait()


async def test_bounds_of_running_and_waiting() -> None:
    """Two run, two wait, the fifth is refused with a delay; places come back in order."""
    admitting, release, order = admission(), asyncio.Event(), []
    tasks = [
        asyncio.create_task(hold(admitting, f"t{index}", release, order)) for index in range(4)
    ]
    await asyncio.sleep(0)
    assert (admitting.num_running, admitting.num_waiting) == (2, 2)
    with pytest.raises(TooBusy) as refused:
        async with admitting.admit("t4", 1):
            pass
    assert refused.value.retry_after_s > 1.0
    release.set()
    await asyncio.gather(*tasks)
    assert order == ["t0", "t1", "t2", "t3"]
    assert (admitting.num_running, admitting.num_waiting) == (0, 0)


async def test_samples_count_as_places() -> None:
    """n = 2 takes both places; more samples than places count as all of them."""
    admitting = admission(max_waiting=0)
    async with admitting.admit("a", 5):
        assert admitting.num_running == 2
        with pytest.raises(TooBusy):
            async with admitting.admit("b", 1):
                pass
    async with admitting.admit("b", 1):
        assert admitting.num_running == 1


async def test_large_requests_are_read_within_bounds() -> None:
    """Who would be refused is refused before the work; who reads counts; places come back."""
    admitting, release = admission(max_running=1, max_waiting=1), asyncio.Event()
    with admitting.preparing("a"), admitting.preparing("b"):
        with pytest.raises(TooBusy) as refused, admitting.preparing("c"):
            pass
        assert refused.value.retry_after_s == 3.0
    with admitting.preparing("c"):
        pass
    tasks = [asyncio.create_task(hold(admitting, name, release, [])) for name in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(TooBusy), admitting.preparing("c"):
        pass
    release.set()
    await asyncio.gather(*tasks)
    with admitting.preparing("c"):
        pass
    admitting.close()
    with pytest.raises(NotReady), admitting.preparing("c"):
        pass


async def test_one_tenant_s_burst_does_not_shut_out_another() -> None:
    """Of those who wait, the tenant with the fewest running goes first."""
    admitting, order = admission(max_waiting=10), []
    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(hold(admitting, "big", rest, order))]
    tasks += [asyncio.create_task(hold(admitting, "big", first, order))]
    tasks += [
        asyncio.create_task(hold(admitting, name, rest, order)) for name in ("big", "big", "small")
    ]
    await asyncio.sleep(0)
    assert order == ["big", "big"]
    first.set()
    while len(order) < 3:
        await asyncio.sleep(0)
    assert order[2] == "small"
    rest.set()
    await asyncio.gather(*tasks)
    assert fewest_running_first(["a", "b", "c"], {"a": 1, "b": 0}) == 1


async def test_giving_up_frees_the_place() -> None:
    """A waiting request that is cancelled, and one that waits too long, hold nothing."""
    admitting, release = admission(max_running=1, max_wait_s=0.01), asyncio.Event()
    running = asyncio.create_task(hold(admitting, "a", release, []))
    await asyncio.sleep(0)
    with pytest.raises(TooBusy):
        async with admitting.admit("b", 1):
            pass
    waiting = asyncio.create_task(hold(admitting, "c", release, []))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert admitting.num_waiting == 0
    release.set()
    await running
    assert admitting.num_running == 0


async def test_closing_refuses_the_waiting_and_waits_for_the_running() -> None:
    """A drain: those who wait and those who come get NotReady, those who run go on."""
    admitting, release = admission(max_running=1), asyncio.Event()
    running = asyncio.create_task(hold(admitting, "a", release, []))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(hold(admitting, "b", release, []))
    await asyncio.sleep(0)
    admitting.close()
    with pytest.raises(NotReady):
        await waiting
    with pytest.raises(NotReady):
        async with admitting.admit("c", 1):
            pass
    idle = asyncio.create_task(admitting.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    release.set()
    await asyncio.gather(running, idle)


async def test_a_tenant_at_its_limit_waits_while_others_pass() -> None:
    """max_running of a tenant holds however free the house is; max_waiting bounds its queue."""
    bounds = {"small": TenantLimits(max_running=1, max_waiting=1)}
    admitting = Admission(
        AdmissionSettings(max_running=4, max_waiting=8),
        lambda tenant: bounds.get(tenant, TenantLimits()),
    )
    first, rest, order = asyncio.Event(), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admitting, "small", first, order))]
    tasks += [
        asyncio.create_task(hold(admitting, name, rest, order)) for name in ("small", "big", "big")
    ]
    await asyncio.sleep(0)
    assert order == ["small", "big", "big"]
    with pytest.raises(TooBusy, match="this tenant"):
        async with admitting.admit("small", 1):
            pass
    first.set()
    while len(order) < 4:
        await asyncio.sleep(0)
    assert order[3] == "small"
    async with admitting.admit("other", 1):
        assert admitting.num_running == 4
    rest.set()
    await asyncio.gather(*tasks)
    async with admitting.admit("small", 3):
        assert admitting.num_running == 1  # counts as what the tenant may run


# ---------------------------------------------------------------- tenants


def test_keys(tmp_path: Path) -> None:
    """A known key gives its tenant; none, another or another scheme gives Unauthenticated."""
    file = tmp_path / "keys"
    file.write_text("# keys\nred: key-of-the-red-team\nblue:key-of-the-blue-team\n")
    tenants = Tenants.load(file)
    assert tenants.authenticate([("authorization", "Bearer key-of-the-blue-team")]) == "blue"
    for metadata in ([], [("authorization", "Bearer nope")], [("authorization", "Basic x")]):
        with pytest.raises(Unauthenticated):
            tenants.authenticate(metadata)
    assert Tenants(None).authenticate([]) == DEFAULT_TENANT


def test_limits_stand_behind_the_key(tmp_path: Path) -> None:
    """Limits are read with the keys; a tenant without any has none; several keys are one tenant."""
    file = tmp_path / "keys"
    file.write_text(
        "red:key-of-the-red-team max_running=4 max_waiting=0\n"
        "red:next-key-of-the-red-team\n"
        "blue:key-of-the-blue-team\n"
    )
    tenants = Tenants.load(file)
    assert tenants.limits_of("red") == TenantLimits(max_running=4, max_waiting=0)
    assert tenants.limits_of("blue") == NO_LIMITS
    for key in ("key-of-the-red-team", "next-key-of-the-red-team"):
        assert tenants.authenticate([("authorization", f"Bearer {key}")]) == "red"


def test_a_changed_file_counts_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    """Rotation: the new key counts after `refresh`, the old one no longer; a bad file is refused
    once and leaves the keys as they were."""
    file = tmp_path / "keys"
    file.write_text("red:the-first-key-of-red\n")
    tenants = Tenants.load(file)
    assert not tenants.refresh()
    file.write_text("red:the-second-key-of-red max_running=1\n")
    assert tenants.refresh()
    second = [("authorization", "Bearer the-second-key-of-red")]
    with pytest.raises(Unauthenticated):
        tenants.authenticate([("authorization", "Bearer the-first-key-of-red")])
    file.write_text("red:short\n")
    with pytest.raises(ConfigError):
        tenants.refresh()
    assert not tenants.refresh()
    assert tenants.authenticate(second) == "red"
    assert tenants.limits_of("red").max_running == 1


def test_every_key_is_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is compared with all keys by compare_digest, also past the one that matches."""
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("coordinator.tenants.hmac", SimpleNamespace(compare_digest=compare))
    file = tmp_path / "keys"
    file.write_text("".join(f"t{index}:key-number-{index}-of-many\n" for index in range(3)))
    tenants = Tenants.load(file)
    assert tenants.authenticate([("authorization", "Bearer key-number-0-of-many")]) == "t0"
    assert len(compared) == 3
    assert all(len(a) == len(b) == 32 for a, b in compared)  # digests: no length to time either


def test_keys_are_neither_kept_nor_told(tmp_path: Path) -> None:
    """No key is found in what Tenants holds, nor in the message about its line."""
    file = tmp_path / "keys"
    file.write_text("red:a-secret-key-of-red max_running=many\n")
    with pytest.raises(ConfigError, match="line 1") as refused:
        Tenants.load(file)
    assert "a-secret" not in str(refused.value)
    file.write_text("red:a-secret-key-of-red\n")
    tenants = Tenants.load(file)
    held = {name: value for name, value in vars(tenants).items() if "a-secret" in repr(value)}
    assert not held


@pytest.mark.parametrize("text", ["", "no separator", "red:short", ":key-of-some-length"])
def test_bad_key_files_name_the_line_not_the_key(tmp_path: Path, text: str) -> None:
    """A key file that cannot work is a configuration error which never prints a key."""
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Tenants.load(file)
    assert "key-of-some-length" not in str(refused.value)
    with pytest.raises(ConfigError):
        Tenants.load(tmp_path / "missing")


# ---------------------------------------------------------------- placement


def test_same_prefix_meets_the_same_replica() -> None:
    """Rendezvous: prompts with one first page agree; removing another replica moves no one."""
    replicas = [Candidate(f"t{index}:1", 0) for index in range(5)]
    homes = {}
    for start in range(200):
        prompt = [start] * 70
        home = choose_target(prefix_key(prompt), replicas, 1.25)
        assert home == choose_target(prefix_key([*prompt, 9, 9]), replicas, 1.25)
        homes[start] = home
    assert set(homes.values()) == {replica.address for replica in replicas}
    fewer = replicas[:-1]
    for start, home in homes.items():
        if home != replicas[-1].address:
            assert choose_target(prefix_key([start] * 70), fewer, 1.25) == home


def test_load_cap_moves_on_to_the_next_choice() -> None:
    """One hot prefix fills its replica to the cap and no further."""
    loads = {f"t{index}": 0 for index in range(4)}
    for _ in range(100):
        replicas = [Candidate(address, load) for address, load in loads.items()]
        chosen = choose_target(b"hot", replicas, 1.25)
        assert chosen is not None
        loads[chosen] += 1
    assert max(loads.values()) <= 1.25 * 25 + 1
    assert min(loads.values()) > 0


def test_avoided_replica_is_the_last_resort() -> None:
    """`avoid` is taken only where it is alone (targets) or never (drafts)."""
    two = [Candidate("a", 0), Candidate("b", 50)]
    assert choose_target(b"x", two, 1.25, avoid="a") == "b"
    assert choose_target(b"x", two[:1], 1.25, avoid="a") == "a"
    assert choose_target(b"x", [], 1.25) is None
    assert choose_draft(two) == "a"
    assert choose_draft(two, avoid="a") == "b"
    assert choose_draft(two[:1], avoid="a") is None


# ---------------------------------------------------------------- output buffer


def stats() -> Stats:
    return Stats(1, 1, 0, 1, 0, 0, (), ())


async def test_buffer_pauses_and_resumes_samples() -> None:
    """Full at max_unread; the sample is told once there is room again."""
    stream, told = OutputStream(1, 2, 60.0, str), []
    stream.connect(lambda: told.append(True), lambda error: None)
    sink = stream.sink(0)
    for index in range(2):
        assert not sink.is_full
        sink.deliver(Deliver(index, (index,), "x", ()))
    assert sink.is_full
    first = await stream.next()
    assert first is not None
    assert first.chunk.round == 0
    assert told == [True]
    sink.finish(Finish(FinishReason.STOP, "", 7, stats()))
    await stream.next()
    last = await stream.next()
    assert last is not None
    assert (last.finished.matched_stop, last.finished.matched_stop_token_id) == ("7", 7)
    assert await stream.next() is None
    stream.close()


async def test_failure_comes_after_what_was_delivered() -> None:
    """A sample's error ends the request, once the chunks before it were read."""
    stream = OutputStream(2, 8, 60.0, str)
    stream.sink(0).deliver(Deliver(0, (1,), "x", ()))
    stream.sink(1).fail(Fail(Failed("NUMERIC_FAULT", "NaN"), stats()))
    assert (await stream.next()) is not None
    with pytest.raises(NumericFault):
        await stream.next()


@pytest.mark.parametrize("num_taken", [0, 1, 2, 4])
async def test_slow_reader_loses_its_request(num_taken: int) -> None:
    """A reader that takes nothing for slow_reader_s is given up, wherever it stalls: before its
    first message, with a buffer that is full, or full by more than one, and with its last message
    at the transport. Neither pages nor its place are held forever."""
    stream = OutputStream(2, 2, 0.0, str)
    given_up: asyncio.Future[SpecmeshError] = asyncio.get_running_loop().create_future()
    stream.connect(lambda: None, given_up.set_result)
    for index in range(4):  # two samples, each of them past the bound
        stream.sink(index % 2).deliver(Deliver(index // 2, (1,), "x", ()))
    for _ in range(num_taken):
        assert await stream.next() is not None
    assert isinstance(await asyncio.wait_for(given_up, 10), Cancelled)
    with pytest.raises(Cancelled):
        await stream.next()
    stream.close()


async def test_a_reader_that_waits_is_not_slow() -> None:
    """Time without a message is the samples', however long they take."""
    stream, given_up = OutputStream(1, 1, 0.0, str), []
    stream.connect(lambda: None, given_up.append)

    async def read() -> object:
        message = await stream.next()
        stream.close()  # it would be slow from here on
        return message

    reading = asyncio.create_task(read())
    for _ in range(100):  # the timer rings at each turn of the loop
        await asyncio.sleep(0)
    stream.sink(0).deliver(Deliver(0, (1,), "x", ()))
    assert await reading is not None
    assert not given_up
