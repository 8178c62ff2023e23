"""TCP over real sockets: what arrives, what is refused, and when memory is free again."""

import asyncio
import socket
import threading

import pytest

from mooncake_mesh.errors import ChecksumMismatch, SliceLost, TransferError
from mooncake_mesh.messenger.transports import certificates, door, frames, link_auth
from mooncake_mesh.messenger.transports.api import LinkLost, SealedSlice, SliceRefused
from mooncake_mesh.messenger.transports.frames import Carriage, Hello, Kind, Verdict
from mooncake_mesh.messenger.transports.outbound import WINDOW_FRAMES
from mooncake_mesh.messenger.transports.paths import Connections, LinkPath
from mooncake_mesh.messenger.transports.streams import receive_exactly
from mooncake_mesh.messenger.transports.windows import slot_slice
from tests.unit.transport_doubles import HOST, HandMadeReceiver, HandMadeSender, RecordingWindows, Relay, Tcp

MiB = 1 << 20
SECRET = bytes(range(32))


@pytest.fixture(params=["clear", "encrypted"])
def tcp(request: pytest.FixtureRequest) -> Tcp:
    return Tcp(identity=certificates.new_identity() if request.param == "encrypted" else None)


def _slices(memory: bytearray, slot_bytes: int, n: int, *, seal: bool = True) -> list[SealedSlice]:
    return [slot_slice(memoryview(memory), i, i * slot_bytes, slot_bytes, seal=seal) for i in range(n)]


@pytest.mark.parametrize("n_lanes", [1, 2, 3])
@pytest.mark.parametrize("slot_bytes", [1, 4096, frames.INLINE_BYTES, frames.INLINE_BYTES + 1, 777_777, 5 * MiB])
def test_bytes_arrive_in_their_slots(slot_bytes: int, n_lanes: int, tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(3 * slot_bytes, n_lanes=n_lanes) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=slot_bytes, n_slots=3)
            await pair.path(token).send(_slices(pair.source, slot_bytes, 3))
            assert pair.target == pair.source

    asyncio.run(run())


def test_transfers_without_end_open_no_more_connections(tcp: Tcp) -> None:
    async def run() -> None:
        relay = Relay()
        try:
            async with tcp.pair(4096, n_lanes=2, via=relay) as pair:
                for _ in range(50):
                    token = pair.windows.open(first_byte=0, slot_bytes=4096, n_slots=1)
                    await pair.path(token).send(_slices(pair.source, 4096, 1))
                assert relay.accepted == 1 + 2  # the control connection and the lanes
        finally:
            relay.close()

    asyncio.run(run())


def test_many_small_slices_of_several_transfers_at_once(tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(8 * 1000 * 300) as pair:
            paths = [
                pair.path(pair.windows.open(first_byte=part * 300_000, slot_bytes=300, n_slots=1000))
                for part in range(8)
            ]
            batches = [
                [
                    slot_slice(memoryview(pair.source), i, part * 300_000 + i * 300, 300, seal=i % 2 == 0)
                    for i in range(1000)
                ]
                for part in range(8)
            ]
            await asyncio.gather(*[path.send(batch) for path, batch in zip(paths, batches, strict=True)])
            assert pair.target == pair.source

    asyncio.run(run())


def test_an_unknown_token_is_refused_and_the_link_goes_on(tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(4 * MiB) as pair:
            for size in (1000, MiB):
                with pytest.raises(SliceRefused):
                    await pair.path(b"?" * 16).send(_slices(pair.source, size, 4))
            assert not any(pair.target)
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=4)
            await pair.path(token).send(_slices(pair.source, MiB, 4))
            assert pair.target == pair.source
            assert pair.listener.n_connections == 3

    asyncio.run(run())


@pytest.mark.parametrize("size", [1000, 3 * MiB])
def test_damaged_bytes_are_noticed(size: int, tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(size) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=size, n_slots=1)
            batch = _slices(pair.source, size, 1)
            pair.source[size // 2] ^= 1
            with pytest.raises(ChecksumMismatch):
                await pair.path(token).send(batch)
            assert [type(error) for error in pair.windows.ends] == [ChecksumMismatch]

    asyncio.run(run())


@pytest.mark.parametrize("size", [0, frames.MAX_FRAME_BYTES + 1])
def test_a_slice_that_no_frame_holds_is_an_error_of_the_caller(size: int, tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            with pytest.raises(TransferError, match="a slice has"):
                await pair.path(b"t" * 16).send([slot_slice(memoryview(pair.source), 0, 0, size, seal=False)])
            assert pair.windows.begun == 0

    asyncio.run(run())


def test_a_revoked_window_takes_nothing_more(tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            await pair.windows.revoke(token)
            with pytest.raises(SliceRefused):
                await pair.path(token).send(_slices(pair.source, MiB, 1))
            assert not any(pair.target)

    asyncio.run(run())


# --- strangers --------------------------------------------------------------------------------------------------------


def _read_to_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while got := connection.recv(4096):
            data += got
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\0" * 64,
        frames.MAGIC + b"\xff" * 40,
        frames.HELLO.pack(frames.MAGIC, 0, b"s" * 16, 1, 0, 0),
        frames.HELLO.pack(frames.MAGIC, 0, b"s" * 16, 1, 3, 2),
        frames.HELLO.pack(frames.MAGIC, 1, b"a lane, no link!", 1, 0, 1),
        frames.HELLO.pack(frames.MAGIC, 0, b"s" * 16, 1, 0, 1)[:9],
    ],
)
def test_a_stranger_is_shown_the_door(hello: bytes, tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(1000) as pair:
            stranger = await asyncio.to_thread(tcp.connect, pair.listener.port)
            with stranger:
                stranger.sendall(hello)
                assert len(await asyncio.to_thread(_read_to_end, stranger)) == link_auth.CHALLENGE_BYTES
            token = pair.windows.open(first_byte=0, slot_bytes=1000, n_slots=1)
            await pair.path(token).send(_slices(pair.source, 1000, 1))
            assert pair.target == pair.source

    asyncio.run(run())


def test_strangers_who_say_nothing_do_not_keep_a_sender_out(monkeypatch: pytest.MonkeyPatch, tcp: Tcp) -> None:
    monkeypatch.setattr(door, "_MAX_CONNECTIONS", 4)

    async def run() -> None:
        async with tcp.pair(1000) as pair:
            strangers = [socket.create_connection((HOST, pair.listener.port), timeout=10) for _ in range(8)]
            token = pair.windows.open(first_byte=0, slot_bytes=1000, n_slots=1)
            await pair.path(token).send(_slices(pair.source, 1000, 1))
            assert pair.target == pair.source
            assert pair.listener.n_connections <= 4
            for stranger in strangers:
                stranger.close()

    asyncio.run(run())


BAD_HELLOS = [
    Hello(kind=Kind.CONTROL, sender=b"s" * 16, epoch=1, lane=0, n_lanes=0),
    Hello(kind=Kind.CONTROL, sender=b"s" * 16, epoch=1, lane=3, n_lanes=2),
    Hello(kind=Kind.LANE, sender=b"a lane, no link!", epoch=1, lane=0, n_lanes=1),
]


@pytest.mark.parametrize("hello", BAD_HELLOS)
def test_a_bad_hello_opens_nothing_even_with_the_secret(hello: Hello, tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(1000) as pair:
            with await asyncio.to_thread(tcp.connect, pair.listener.port) as stranger:
                challenge = await asyncio.to_thread(receive_exactly, stranger, link_auth.CHALLENGE_BYTES)
                stranger.sendall(link_auth.answer(pair.secret, challenge, hello).said)
                assert await asyncio.to_thread(_read_to_end, stranger) == b""
            assert pair.listener.n_connections == 0

    asyncio.run(run())


def test_who_does_not_know_the_secret_reads_and_writes_nothing(tcp: Tcp) -> None:
    """Not with another secret, not with what a sender has said before, and not by taking a sender's link down."""

    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            stranger = tcp.connections(pair.listener.port, SECRET, 2)
            with pytest.raises(TransferError, match="cannot connect"):
                await LinkPath(stranger, token, memoryview(pair.source)).send(_slices(pair.source, MiB, 1))
            stranger.close()
            assert not any(pair.target)

            hello = Hello(kind=Kind.CONTROL, sender=b"s" * 16, epoch=1, lane=0, n_lanes=1)
            with await asyncio.to_thread(tcp.connect, pair.listener.port) as sender:
                challenge = await asyncio.to_thread(receive_exactly, sender, link_auth.CHALLENGE_BYTES)
                answer = link_auth.answer(pair.secret, challenge, hello)
                sender.sendall(answer.said)
                welcome = await asyncio.to_thread(receive_exactly, sender, link_auth.WELCOME_BYTES)
                assert answer.is_welcome(welcome)
                with await asyncio.to_thread(tcp.connect, pair.listener.port) as replayer:
                    await asyncio.to_thread(receive_exactly, replayer, link_auth.CHALLENGE_BYTES)
                    replayer.sendall(answer.said)
                    assert await asyncio.to_thread(_read_to_end, replayer) == b""
                assert pair.listener.n_connections == 1

    asyncio.run(run())


@pytest.mark.parametrize("impostor", ["silent", "deaf", "wrong"])
def test_a_sender_sends_nothing_to_who_does_not_know_the_secret(impostor: str, tcp: Tcp) -> None:
    said: list[bytes] = []

    def pretend(listener: socket.socket) -> None:
        while True:
            try:
                connection = tcp.accept(listener)
            except OSError:
                return
            with connection:
                if impostor == "silent":
                    continue
                challenge = link_auth.Challenge(SECRET if impostor == "wrong" else bytes(32))
                connection.sendall(challenge.data)
                said.append(receive_exactly(connection, link_auth.HELLO_BYTES))
                connection.sendall(b"\x01" + bytes(link_auth.WELCOME_BYTES - 1))
                said.append(_read_to_end(connection))

    async def run() -> None:
        with socket.create_server((HOST, 0)) as listener:
            thread = threading.Thread(target=pretend, args=(listener,))
            thread.start()
            connections = tcp.connections(listener.getsockname()[1], b"?" * 32, 1)
            with pytest.raises(TransferError, match="cannot connect"):
                await connections.link()
            connections.close()
            listener.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(thread.join)

    asyncio.run(run())
    assert all(len(part) in (0, link_auth.HELLO_BYTES) for part in said)


def _head(
    n_slices: int = 1, carriage: int = Carriage.LANES, payload_bytes: int = MiB, token: bytes = b"t" * 16
) -> bytes:
    return frames.HEAD.pack(0, token, n_slices, carriage, payload_bytes)


@pytest.mark.parametrize(
    "bad",
    [
        _head(n_slices=0),
        _head(n_slices=frames.MAX_SLICES + 1),
        _head(carriage=7),
        _head(payload_bytes=0),
        _head(payload_bytes=frames.MAX_FRAME_BYTES + 1),
        _head(carriage=Carriage.INLINE, payload_bytes=frames.INLINE_BYTES + 1),
        _head(payload_bytes=MiB) + frames.ENTRY.pack(0, 0, 1, MiB - 1, 0, 0),
    ],
)
def test_a_bad_head_ends_the_link(bad: bytes, tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            sender = await asyncio.to_thread(HandMadeSender, pair)
            sender.control.sendall(bad)
            assert await asyncio.to_thread(_read_to_end, sender.control) == b""
            assert await asyncio.to_thread(_read_to_end, sender.lanes[0]) == b""
            sender.close()
            assert pair.windows.begun == 0

    asyncio.run(run())


@pytest.mark.parametrize("payload_sent", [0, 1, MiB - 1, MiB])
def test_a_sender_that_dies_in_a_frame_leaves_its_writes_over(payload_sent: int, tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            sender = await asyncio.to_thread(HandMadeSender, pair)
            sender.control.sendall(_head(token=token) + frames.ENTRY.pack(0, 0, 1, MiB, 0, 0))
            await asyncio.to_thread(sender.lanes[0].sendall, bytes(payload_sent))
            sender.close()
            await pair.windows.ended.wait()
            assert [type(error) for error in pair.windows.ends] == [LinkLost]
            await pair.windows.revoke(token)
            assert pair.windows.received_bytes == 0

    asyncio.run(run())


def test_a_lane_out_of_step_ends_the_link(tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            sender = await asyncio.to_thread(HandMadeSender, pair)
            sender.control.sendall(_head(token=token) + frames.ENTRY.pack(0, 0, 1, MiB, 0, 0))
            await asyncio.to_thread(sender.lanes[0].sendall, bytes(MiB) + frames.TRAILER.pack(9, 1))
            await pair.windows.ended.wait()
            assert [type(error) for error in pair.windows.ends] == [LinkLost]
            sender.close()

    asyncio.run(run())


def test_a_given_up_frame_is_reported_as_lost(tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            sender = await asyncio.to_thread(HandMadeSender, pair)
            sender.control.sendall(_head(token=token) + frames.ENTRY.pack(0, 0, 1, MiB, 0, 0))
            await asyncio.to_thread(sender.lanes[0].sendall, bytes(MiB) + frames.TRAILER.pack(0, 0))
            ack = await asyncio.to_thread(receive_exactly, sender.control, frames.ACK.size)
            assert frames.ACK.unpack(ack) == (0, Verdict.REFUSED)
            assert [type(error) for error in pair.windows.ends] == [SliceLost]
            sender.close()

    asyncio.run(run())


# --- slow and broken peers --------------------------------------------------------------------------------------------


def _received(connection: socket.socket) -> bytes:
    return _read_to_end(connection)


@pytest.mark.parametrize("reads_on", [True, False])
def test_memory_is_not_read_after_a_cancel(reads_on: bool, tcp: Tcp) -> None:
    """The peer stalls in the middle of a frame; whether or not it goes on later, it sees no byte of the new content."""
    size = 16 * MiB

    async def run() -> None:
        receiver = HandMadeReceiver(tcp)
        memory = bytearray(b"\x01") * size
        connections = tcp.connections(receiver.port, receiver.secret, 1)
        welcome = asyncio.get_running_loop().run_in_executor(None, receiver.welcome, 1)
        path = LinkPath(connections, b"t" * 16, memoryview(memory))
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(path.send(_slices(memory, size, 1, seal=False)))
            await welcome
            control, lane = receiver.connections
            await asyncio.to_thread(receive_exactly, control, frames.HEAD.size + frames.ENTRY.size)
            before = await asyncio.to_thread(receive_exactly, lane, 100_000)
            reading = asyncio.get_running_loop().run_in_executor(None, _received, lane) if reads_on else None
            sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled()
            memory[:] = b"\x02" * size
            connections.close()
            rest = await reading if reading is not None else await asyncio.to_thread(_received, lane)
        assert b"\x02" not in before + rest
        if len(before + rest) == size + frames.TRAILER.size:  # else it was cut, which says the same
            number, is_whole = frames.TRAILER.unpack(rest[-frames.TRAILER.size :])
            assert number == 0
            assert is_whole == (b"\0" not in rest[: -frames.TRAILER.size])
        receiver.close()

    asyncio.run(run())


def test_a_window_of_frames_is_under_way_and_no_more(tcp: Tcp) -> None:
    async def run() -> None:
        receiver = HandMadeReceiver(tcp)
        memory = bytearray(100)
        connections = tcp.connections(receiver.port, receiver.secret, 1)
        welcome = asyncio.get_running_loop().run_in_executor(None, receiver.welcome, 1)
        path = LinkPath(connections, b"t" * 16, memoryview(memory))
        async with asyncio.TaskGroup() as tasks:
            batch = _slices(memory, 100, 1)
            sends = [tasks.create_task(path.send(batch)) for _ in range(WINDOW_FRAMES + 1)]
            await welcome
            control = receiver.connections[0]
            frame_bytes = frames.HEAD.size + frames.ENTRY.size + 100
            await asyncio.to_thread(receive_exactly, control, WINDOW_FRAMES * frame_bytes)
            control.settimeout(0)
            with pytest.raises(BlockingIOError):
                control.recv(1)
            control.settimeout(10)
            control.sendall(frames.ACK.pack(3, Verdict.WRITTEN))
            await asyncio.to_thread(receive_exactly, control, frame_bytes)
            for number in {*range(WINDOW_FRAMES + 1)} - {3}:
                control.sendall(frames.ACK.pack(number, Verdict.WRITTEN))
            await asyncio.wait(sends)
        connections.close()
        receiver.close()

    asyncio.run(run())


def test_a_submission_tells_when_it_is_over(tcp: Tcp) -> None:
    async def run() -> None:
        async with tcp.pair(4 * MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=4)
            submission = await pair.path(token).submit(_slices(pair.source, MiB, 4))
            over = asyncio.Event()
            submission.add_done_callback(over.set)
            await over.wait()
            assert submission.is_over
            assert pair.target == pair.source
            submission.cancel()  # too late, and harmless
            await submission

    asyncio.run(run())


def test_a_cut_link_is_opened_again_and_the_rest_is_sent(tcp: Tcp) -> None:
    async def run() -> None:
        relay = Relay()
        async with tcp.pair(8 * MiB, via=relay) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=8)
            relay.cut_after(3 * MiB + MiB // 2)  # in the middle of a slice: whole ones come to no such sum
            await pair.path(token).send(_slices(pair.source, MiB, 8))
            assert relay.cuts == 1
            assert pair.target == pair.source
            assert any(isinstance(error, LinkLost) for error in pair.windows.ends)
            await pair.windows.revoke(token)
        relay.close()

    asyncio.run(run())


def test_a_receiver_that_restarts_is_reached_again(tcp: Tcp) -> None:
    async def run() -> None:
        target = bytearray(MiB)
        source = bytearray(b"\x05") * MiB
        port = 0
        connections: Connections | None = None
        for _ in range(2):
            windows = RecordingWindows(MiB)
            listener = tcp.listener(port, target, windows, SECRET)
            port = listener.port
            connections = connections or tcp.connections(port, SECRET, 2)
            token = windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            target[:] = bytes(MiB)
            await LinkPath(connections, token, memoryview(source)).send(_slices(source, MiB, 1))
            assert target == source
            await listener.close()
        assert connections is not None
        connections.close()

    asyncio.run(run())


def test_a_receiver_that_is_not_there_is_an_error_and_then_rests(tcp: Tcp) -> None:
    async def run(port: int) -> None:
        connections = tcp.connections(port, SECRET, 2)
        for _ in range(2):
            with pytest.raises(TransferError, match="cannot connect"):
                await connections.link()
        connections.close()

    with socket.socket() as deaf:  # does not listen, and keeps the port from whoever would
        deaf.bind((HOST, 0))
        asyncio.run(run(deaf.getsockname()[1]))


def test_a_closed_listener_writes_no_more(tcp: Tcp) -> None:
    """A frame is half way when the receiver closes: close() returns when its lane has let go."""

    async def run() -> None:
        async with tcp.pair(MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            sender = await asyncio.to_thread(HandMadeSender, pair)
            sender.control.sendall(_head(token=token) + frames.ENTRY.pack(0, 0, 1, MiB, 0, 0))
            await asyncio.to_thread(sender.lanes[0].sendall, bytes(1000))
            await pair.windows.first_begun.wait()
            await pair.listener.close()
            assert [type(error) for error in pair.windows.ends] == [LinkLost]
            for lane in [thread for thread in threading.enumerate() if thread.name == "kv-receive"]:
                lane.join(10)  # it has told the loop that it let go, and does nothing after that but end
                assert not lane.is_alive()
            sender.close()

    asyncio.run(run())
