"""TLS below a link: the words of a plain socket, who is believed, and what the network sees."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
import structlog

from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.transports import tcp as tcp_module
from mooncake_mesh.messenger.transports import tls
from mooncake_mesh.messenger.transports.certificates import new_identity
from mooncake_mesh.messenger.transports.paths import LinkPath
from mooncake_mesh.messenger.transports.streams import receive_exactly, send_group, shut, tune
from mooncake_mesh.messenger.transports.tcp import tcp_connections
from mooncake_mesh.messenger.transports.tls import RECORD_BYTES, TlsSocket, gathered
from mooncake_mesh.messenger.transports.windows import slot_slice
from tests.unit.mesh_doubles import until
from tests.unit.transport_doubles import HOST, Pair, Relay, Tcp

MiB = 1 << 20
PLAIN = Tcp(identity=None)
DATA = bytes(range(251)) * (MiB // 251)


@dataclass
class Ends:
    """Both ends of one connection after the handshake."""

    sender: TlsSocket
    receiver: TlsSocket


@pytest.fixture
def encrypted() -> Tcp:
    return Tcp(identity=new_identity())


@pytest.fixture
def ends(encrypted: Tcp) -> Iterator[Ends]:
    accepted: list[socket.socket] = []
    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=lambda: accepted.append(encrypted.accept(listener)))
        thread.start()
        sender = encrypted.connect(listener.getsockname()[1])
        thread.join()
    receiver = accepted[0]
    assert isinstance(sender, TlsSocket)
    assert isinstance(receiver, TlsSocket)
    with sender, receiver:
        for end in (sender, receiver):
            tune(end, timeout_s=10.0)
        yield Ends(sender, receiver)


def _aside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# --- the words of a socket --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "goes"),
    [
        ([], []),
        ([5], [5]),
        ([5, 6, 7], [18]),
        ([RECORD_BYTES], [RECORD_BYTES]),
        ([5, RECORD_BYTES, 6, 7, 2 * RECORD_BYTES, 8], [5, RECORD_BYTES, 13, 2 * RECORD_BYTES, 8]),
    ],
)
def test_small_buffers_that_stand_together_are_one_record(sizes: list[int], goes: list[int]) -> None:
    buffers = [memoryview(DATA[i : i + size]) for i, size in enumerate(sizes)]
    parts = gathered(buffers, all_at_once=False)
    assert [len(part) for part in parts] == goes
    assert b"".join(parts) == b"".join(buffers) == b"".join(gathered(buffers, all_at_once=True))


@pytest.mark.parametrize("cuts", [[1], [RECORD_BYTES - 1, 1, 3], [100] * 50, [300_000, 5]])
def test_lists_of_memory_go_in_and_out(ends: Ends, cuts: list[int]) -> None:
    sent = [memoryview(DATA)[i : i + size] for i, size in enumerate(cuts)]
    received = [bytearray(size) for size in reversed(cuts)]
    thread = _aside(lambda: send_group(ends.sender, list(sent)))
    got = ends.receiver.recvmsg_into([memoryview(part) for part in received])[0]
    thread.join()
    assert got == sum(cuts)
    assert b"".join(received) == b"".join(sent)


def test_what_is_half_full_when_the_sender_ends_is_told(ends: Ends) -> None:
    ends.sender.sendall(b"12345")
    ends.sender.close()
    assert ends.receiver.recvmsg_into([memoryview(bytearray(3)), memoryview(bytearray(9))])[0] == 5
    with pytest.raises(ConnectionResetError):
        receive_exactly(ends.receiver, 1)


def _fill(sender: TlsSocket) -> int:
    """Send DATA again and again until the connection would block; returns how much of it was taken before."""
    sent = 0
    while True:
        try:
            sent += sender.sendmsg([memoryview(DATA)])
        except BlockingIOError:
            return sent


def test_a_connection_that_does_not_block_says_so_and_goes_on_where_it_was(ends: Ends) -> None:
    """The same bytes come again, with more behind them: that is how an outbox behaves."""
    ends.sender.setblocking(False)
    ends.receiver.setblocking(False)
    with pytest.raises(BlockingIOError):
        ends.receiver.recv(1)
    sent = _fill(ends.sender)
    outbox = bytearray(DATA)
    received = bytearray()
    ends.receiver.setblocking(True)
    thread = _aside(lambda: received.extend(receive_exactly(ends.receiver, sent + len(DATA) + 3)))
    outbox += b"end"
    while outbox:
        try:
            del outbox[: ends.sender.send(outbox)]
        except BlockingIOError:
            continue
    thread.join()
    assert received == DATA * (sent // len(DATA) + 1) + b"end"


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_thread_that_waits_is_ended_by_a_shutdown_and_sends_nothing_in_clear(ends: Ends, who: str) -> None:
    failures: list[OSError] = []
    began = threading.Event()

    def work() -> None:
        began.set()
        try:
            while True:
                if who == "sender":
                    send_group(ends.sender, [memoryview(DATA)])
                else:
                    receive_exactly(ends.receiver, 1)
        except OSError as error:
            failures.append(error)

    thread = _aside(work)
    began.wait()
    shut(getattr(ends, who))
    thread.join()
    assert failures
    with pytest.raises(OSError):
        getattr(ends, who).sendall(b"after the end")


def test_who_waits_too_long_is_told(ends: Ends) -> None:
    tune(ends.receiver, timeout_s=0.05)
    with pytest.raises(TimeoutError):
        receive_exactly(ends.receiver, 1)


def test_a_key_is_used_for_so_many_records_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the link breaks, and the next one has other keys: the transfer goes on."""
    monkeypatch.setattr(tls, "_MOST_RECORDS", 2 * MiB // RECORD_BYTES)

    async def scenario(pair: Pair, relay: Relay) -> None:
        for part in range(6):
            token = pair.windows.open(first_byte=part * MiB, slot_bytes=MiB, n_slots=1)
            await pair.path(token).send([slot_slice(memoryview(pair.source), 0, part * MiB, MiB)])
        assert pair.target == pair.source
        assert relay.accepted >= 3 * 2

    _relayed(Tcp(identity=new_identity()), scenario, size_bytes=6 * MiB)


# --- who is believed --------------------------------------------------------------------------------------------------


def _relayed(tcp: Tcp, scenario: Callable[[Pair, Relay], Awaitable[None]], size_bytes: int) -> None:
    async def run() -> None:
        relay = Relay()
        try:
            async with tcp.pair(size_bytes, n_lanes=1, via=relay) as pair:
                await scenario(pair, relay)
        finally:
            relay.close()

    asyncio.run(run())


async def _still_moves(pair: Pair) -> None:
    size = len(pair.source)
    pair.target[:] = bytes(size)
    await pair.path(pair.windows.open(first_byte=0, slot_bytes=size, n_slots=1)).send(
        [slot_slice(memoryview(pair.source), 0, 0, size)]
    )
    assert pair.target == pair.source


def test_a_certificate_is_new_each_time() -> None:
    assert new_identity().fingerprint != new_identity().fingerprint
    assert len(new_identity().fingerprint) == 32


def test_another_certificate_is_told_nothing(encrypted: Tcp) -> None:
    """As that of one who stands in between: not even a hello leaves the sender."""

    async def run() -> None:
        impostor = Tcp(identity=new_identity())
        async with impostor.pair(MiB) as pair:
            await _still_moves(pair)
            with structlog.testing.capture_logs() as logs:
                connections = encrypted.connections(pair.listener.port, pair.secret, 1)
                with pytest.raises(TransferError, match="another certificate than the receiver"):
                    await connections.link()
                connections.close()
                await until(lambda: pair.listener.n_connections == 3)
            reasons = {line["reason"] for line in logs if line["event"] == "stranger_dismissed"}
            assert reasons == {"closed or cut short before the hello"}
            await _still_moves(pair)

    asyncio.run(run())


def test_a_sender_without_tls_is_refused_and_told_what_may_be_wrong(
    encrypted: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with encrypted.pair(MiB) as pair:
            await _still_moves(pair)
            monkeypatch.setattr(tcp_module, "_CONNECT_TIMEOUT_S", 0.05)  # for the one who is refused
            connections = tcp_connections(HOST, pair.listener.port, pair.secret, 1)
            with pytest.raises(TransferError, match="waits for something else, such as TLS"):
                await LinkPath(connections, b"t" * 16, memoryview(pair.source)).submit([])
            connections.close()
            await _still_moves(pair)

    asyncio.run(run())


def test_a_sender_with_tls_is_not_content_with_less(encrypted: Tcp) -> None:
    async def run() -> None:
        async with PLAIN.pair(MiB) as pair:
            connections = encrypted.connections(pair.listener.port, pair.secret, 1)
            with pytest.raises(TransferError, match="does not speak TLS"):
                await connections.link()
            connections.close()
            await _still_moves(pair)

    asyncio.run(run())


_ALERT_BYTES = 7


def _heard(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:  # it had said more than was read
        return b""


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", bytes(200), b"MKV2" + bytes(90), b"\x16\x03\x01"]
)
def test_a_stranger_who_speaks_no_tls_is_dismissed_and_disturbs_nothing(encrypted: Tcp, said: bytes) -> None:
    async def run() -> None:
        async with encrypted.pair(MiB) as pair:
            await _still_moves(pair)
            with structlog.testing.capture_logs() as logs:
                with socket.create_connection((HOST, pair.listener.port), timeout=10) as stranger:
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    assert len(await asyncio.to_thread(_heard, stranger)) <= _ALERT_BYTES
                await until(lambda: pair.listener.n_connections == 3)
            (line,) = [line for line in logs if line["event"] == "stranger_dismissed"]
            assert line["transport"] == "tcp+tls"
            assert line["reason"]
            await _still_moves(pair)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["clear", "encrypted"])
def test_who_changes_a_packet_changes_no_kv_where_it_is_encrypted(kind: str) -> None:
    """Without checksums, which are no secret: in clear the change goes unnoticed, under TLS the link breaks for it."""
    tcp = PLAIN if kind == "clear" else Tcp(identity=new_identity())

    async def scenario(pair: Pair, relay: Relay) -> None:
        token = pair.windows.open(first_byte=0, slot_bytes=4 * MiB, n_slots=1)
        relay.damage_after(2 * MiB)
        await pair.path(token).send([slot_slice(memoryview(pair.source), 0, 0, 4 * MiB, seal=False)])
        assert (pair.target == pair.source) == (kind == "encrypted")
        assert relay.accepted == (2 if kind == "clear" else 4)

    _relayed(tcp, scenario, size_bytes=4 * MiB)


# --- what the network sees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [1000, MiB], ids=["small payloads", "lanes"])
@pytest.mark.parametrize("kind", ["clear", "encrypted"])
def test_kv_is_on_the_wire_only_where_it_is_not_encrypted(kind: str, slot_bytes: int) -> None:
    """Fails without TLS, that is: what is looked for is there then."""
    tcp = PLAIN if kind == "clear" else Tcp(identity=new_identity())

    async def scenario(pair: Pair, relay: Relay) -> None:
        await _still_moves(pair)
        found = [
            start
            for start in range(0, slot_bytes - 16, slot_bytes // 100)
            if pair.source[start : start + 16] in relay.seen
        ]
        assert len(relay.seen) > slot_bytes
        if kind == "clear":
            assert found
        else:
            assert not found
            assert pair.secret not in relay.seen

    _relayed(tcp, scenario, slot_bytes)
