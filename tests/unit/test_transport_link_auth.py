"""Proofs of a link's two ends: what is accepted is exactly what was said to this challenge with this secret."""

import pytest

from mooncake_mesh.messenger.transports import link_auth
from mooncake_mesh.messenger.transports.frames import FrameError, Hello, Kind

SECRET = bytes(range(32))
HELLO = Hello(kind=Kind.LANE, sender=b"s" * 16, epoch=7, lane=1, n_lanes=2)


def test_both_ends_convince_each_other() -> None:
    challenge = link_auth.Challenge(SECRET)
    answer = link_auth.answer(SECRET, challenge.data, HELLO)
    hello, welcome = challenge.check(answer.said)
    assert hello == HELLO
    assert answer.is_welcome(welcome)
    assert (len(challenge.data), len(answer.said), len(welcome)) == (
        link_auth.CHALLENGE_BYTES,
        link_auth.HELLO_BYTES,
        link_auth.WELCOME_BYTES,
    )


def test_every_byte_of_the_hello_counts() -> None:
    challenge = link_auth.Challenge(SECRET)
    said = link_auth.answer(SECRET, challenge.data, HELLO).said
    for index in range(len(said)):
        with pytest.raises(FrameError, match="not proven"):
            challenge.check(said[:index] + bytes([said[index] ^ 1]) + said[index + 1 :])


def test_every_byte_of_the_welcome_counts() -> None:
    challenge = link_auth.Challenge(SECRET)
    answer = link_auth.answer(SECRET, challenge.data, HELLO)
    _, welcome = challenge.check(answer.said)
    for index in range(len(welcome)):
        assert not answer.is_welcome(welcome[:index] + bytes([welcome[index] ^ 1]) + welcome[index + 1 :])


def test_another_secret_or_challenge_proves_nothing() -> None:
    first, second = link_auth.Challenge(SECRET), link_auth.Challenge(SECRET)
    for said in (
        link_auth.answer(bytes(32), first.data, HELLO).said,
        link_auth.answer(SECRET, second.data, HELLO).said,
        b"",
        link_auth.answer(SECRET, first.data, HELLO).said[:-1],
        link_auth.answer(SECRET, first.data, HELLO).said + b"\0",
    ):
        with pytest.raises(FrameError):
            first.check(said)


def test_a_proof_sent_back_is_not_the_other_end_s() -> None:
    challenge = link_auth.Challenge(SECRET)
    answer = link_auth.answer(SECRET, challenge.data, HELLO)
    assert not answer.is_welcome(b"\x01" + answer.said[-32:])


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n", b"MKC2" + bytes(32), b"MKC1" + bytes(31)])
def test_what_is_no_challenge_is_not_answered(data: bytes) -> None:
    with pytest.raises(FrameError):
        link_auth.answer(SECRET, data, HELLO)
