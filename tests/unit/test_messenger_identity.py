"""Whether a messenger has a certificate, and what it says where it cannot make one."""

import sys

import pytest

from mooncake_mesh.config import MessengerConfig
from mooncake_mesh.errors import ConfigError
from mooncake_mesh.messenger.identity import identity_of


def test_only_who_encrypts_has_one() -> None:
    assert identity_of(MessengerConfig()) is None
    first, second = (identity_of(MessengerConfig(tcp_tls=True)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.fingerprint != second.fingerprint


def test_without_cryptography_it_says_where_that_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake_mesh.messenger.transports.certificates", None)
    assert identity_of(MessengerConfig()) is None
    with pytest.raises(ConfigError, match=r"^messenger.tcp_tls: .*pip install 'mooncake-mesh\[tls\]'"):
        identity_of(MessengerConfig(tcp_tls=True))
