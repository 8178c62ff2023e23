"""What a leader asks of etcd, held against the stand-in of the tests and against the real one where it is installed."""

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_mesh.conductor.etcd import Etcd, EtcdError, Seat
from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_mesh.errors import ConfigError
from tests.etcd_double import NO_ETCD, EtcdDouble, real_etcd
from tests.unit.mesh_doubles import Run, on_both_loops

NOBODY = "http://127.0.0.1:9"
LEASE_S = 60
"""Longer than anything takes here, also where a real etcd has to wait for its disk."""


@pytest.fixture(scope="module")
def double() -> Iterator[EtcdDouble]:
    with EtcdDouble() as running:
        yield running


@pytest.fixture(scope="module", params=["stand-in", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "stand-in":
        yield request.getfixturevalue("double").url
    elif shutil.which("etcd") is None:
        pytest.skip(NO_ETCD)
    else:
        with real_etcd(tmp_path_factory.mktemp("etcd")) as running:
            yield running


Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@asynccontextmanager
async def serving(handle: Handle) -> AsyncIterator[str]:
    """URL of a server that does *handle* with each connection and hangs up."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with suppress(OSError, EOFError):
            await handle(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*(task for task in tasks if task is not None))


def client(url: str, key: str, *, lease_s: int = LEASE_S, timeout_s: float = 20.0) -> Etcd:
    return Etcd(EtcdConfig(endpoints=url, key=key, lease_s=lease_s), timeout_s=timeout_s)


def test_a_free_seat_is_taken_once(url: str) -> None:
    async def scenario() -> None:
        etcd = client(url, "taken once")
        assert await etcd.seat() is None
        mine, theirs = await etcd.grant(), await etcd.grant()
        assert (mine.ttl_s, mine.lease != theirs.lease) == (LEASE_S, True)
        seat = await etcd.take(mine.lease, "a at tcp://10.0.0.1:7700")
        assert seat is not None
        assert seat == await etcd.seat() == Seat(epoch=seat.epoch, holder="a at tcp://10.0.0.1:7700")
        assert await etcd.take(theirs.lease, "b") is None
        await etcd.revoke(theirs.lease)
        assert await etcd.seat() == seat

    asyncio.run(scenario())


def test_a_seat_goes_with_its_lease_and_the_next_holder_has_a_higher_epoch(url: str) -> None:
    async def scenario() -> None:
        etcd = client(url, "goes")
        epochs = []
        for _ in range(3):
            grant = await etcd.grant()
            seat = await etcd.take(grant.lease, "a")
            assert seat is not None
            epochs.append(seat.epoch)
            assert await etcd.keep_alive(grant.lease) == LEASE_S
            await etcd.revoke(grant.lease)
            assert await etcd.seat() is None
            assert await etcd.keep_alive(grant.lease) == 0
            await etcd.revoke(grant.lease)  # again: nothing to end
        assert epochs == sorted(set(epochs))

    asyncio.run(scenario())


def test_a_lease_that_is_not_renewed_ends(url: str) -> None:
    async def scenario() -> None:
        etcd = client(url, "ends", lease_s=2)
        asked_s = time.monotonic()
        grant = await etcd.grant()
        assert await etcd.take(grant.lease, "a") is not None
        async with asyncio.timeout(20.0):
            while await etcd.seat() is not None:  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.05)
        assert time.monotonic() - asked_s > 0.8 * grant.ttl_s, "sooner than its holder trusts it"
        with pytest.raises(EtcdError, match="requested lease not found"):
            await etcd.take(grant.lease, "a")

    asyncio.run(scenario())


def test_the_endpoint_that_answers_is_asked_first_from_then_on(double: EtcdDouble) -> None:
    async def scenario() -> None:
        asked = 0

        async def hang_up(*_: object) -> None:
            nonlocal asked
            asked += 1

        async with serving(hang_up) as url:
            etcd = client(f"{url}, {double.url}/", "several")
            for _ in range(3):
                assert await etcd.seat() is None
        assert asked == 1

    asyncio.run(scenario())


def test_nobody_is_there() -> None:
    async def scenario() -> None:
        with pytest.raises(EtcdError, match=f"{NOBODY}: .*refused|{NOBODY}: .*Connect"):
            await client(NOBODY, "k").seat()

    asyncio.run(scenario())


def test_one_that_does_not_answer_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with serving(lambda reader, _: reader.read()) as url:
            with pytest.raises(EtcdError, match=r"no answer in 0\.05 s"):
                await client(url, "k", timeout_s=0.05).seat()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "closed before the answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", "no JSON object"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "no JSON object"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}", "closed before the answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "Expected HTTP/"),
        (b'HTTP/1.1 401 No\r\ncontent-length: 20\r\n\r\n{"error": "no user"}', "HTTP 401: no user"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"kvs": [{}]}', "create_revision=None"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n200000\r\n" + b" " * 0x200000, "more than 1048576"),
    ],
    ids=["nothing", "a list", "no JSON", "half", "ssh", "401", "another key", "endless"],
)
def test_an_answer_that_makes_no_sense_is_an_error(answer: bytes, complaint: str) -> None:
    async def scenario() -> None:
        async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            writer.write(answer)

        async with serving(odd) as url:
            with pytest.raises(EtcdError, match=complaint):
                await client(url, "k").seat()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority (``ca.pem``), and what it has signed for 127.0.0.1 (``node.pem``, ``node.key``)."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make certificates with")
    folder = tmp_path_factory.mktemp("certs")
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    ca = [*new, "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"]
    node = [*new, "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1", "-CA", "ca.pem", "-CAkey", "ca.key"]
    for command in (ca, [*node, "-keyout", "node.key", "-out", "node.pem"]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def tls_double(certs: Path) -> Iterator[EtcdDouble]:
    """One that wants to see a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certs / "ca.pem")
    context.load_cert_chain(certs / "node.pem", certs / "node.key")
    context.verify_mode = ssl.CERT_REQUIRED
    with EtcdDouble(context) as running:
        yield running


@on_both_loops
def test_over_tls_both_ends_show_certificates(run: Run[None], certs: Path, tls_double: EtcdDouble) -> None:
    async def scenario() -> None:
        config = EtcdConfig(
            endpoints=tls_double.url, ca=certs / "ca.pem", cert=certs / "node.pem", cert_key=certs / "node.key"
        )
        etcd = Etcd(config, timeout_s=5.0)
        grant = await etcd.grant()
        assert await etcd.take(grant.lease, "a") is not None
        with pytest.raises(EtcdError, match=r"(?i)certificate"):
            await Etcd(EtcdConfig(endpoints=tls_double.url), timeout_s=5.0).seat()
        with pytest.raises(EtcdError):
            await Etcd(EtcdConfig(endpoints=tls_double.url, ca=certs / "ca.pem"), timeout_s=5.0).seat()

    run(scenario())


def test_certificates_that_are_not_there_are_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    config = EtcdConfig(endpoints="https://etcd:2379", ca=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"conductor\.etcd\.ca"):
        Etcd(config, timeout_s=1.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"endpoints": "127.0.0.1:2379"}, "endpoints: must be http://HOST:PORT"),
        ({"endpoints": "http://etcd"}, "endpoints: must be http://HOST:PORT"),
        ({"endpoints": "http://etcd:port"}, "endpoints: must be http://HOST:PORT"),
        ({"endpoints": "http://etcd:2379/v3"}, "endpoints: must be http://HOST:PORT"),
        ({"endpoints": "http://user:word@etcd:2379"}, "endpoints: must be http://HOST:PORT"),
        ({"endpoints": "http://a:1,https://b:1"}, "endpoints: must be all"),
        ({"key": ""}, "key: must not be empty"),
        ({"lease_s": 1}, "lease_s: must be at least 2"),
        ({"cert": Path("c")}, "cert: goes with cert_key"),
    ],
)
def test_settings_that_cannot_be_meant(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(EtcdConfig(), **change)  # type: ignore[arg-type]


def test_what_goes_over_a_network_in_clear_is_known() -> None:
    assert EtcdConfig(endpoints="http://127.0.0.1:1,http://[::1]:1,http://localhost:1").urls_in_clear == ()
    assert EtcdConfig(endpoints="https://10.0.0.1:2379").urls_in_clear == ()
    assert EtcdConfig(endpoints="http://etcd:1,http://127.0.0.1:1").urls_in_clear == ("http://etcd:1",)


def test_endpoints_are_a_list() -> None:
    assert EtcdConfig().urls == ()
    assert EtcdConfig(endpoints="http://a:1/, http://[::1]:2").urls == ("http://a:1", "http://[::1]:2")
