"""What the role classes accept, and that what they refuse is named."""

import dataclasses
from pathlib import Path

import pytest

from mooncake_mesh.config import (
    SECTIONS,
    ConductorConfig,
    DecodeConfig,
    FakeConfig,
    GatewayConfig,
    MessengerConfig,
    PrefillConfig,
    TransportKind,
    UpConfig,
)
from mooncake_mesh.config_checks import exposed
from mooncake_mesh.config_pipeline import PipelineConfig


@pytest.mark.parametrize("cls", SECTIONS.values())
def test_defaults_are_valid_and_frozen(cls: type) -> None:
    config = cls()
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))
    assert not hasattr(config, "__dict__")


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (ConductorConfig, "heartbeat_s", 0.0),
        (ConductorConfig, "heartbeat_s", float("nan")),
        (ConductorConfig, "suspect_after_s", 0.5),
        (ConductorConfig, "dead_after_s", 1.5),
        (ConductorConfig, "index_max_blocks", 0),
        (ConductorConfig, "publish", "tcp://*:7701"),
        (ConductorConfig, "instance_id", "a/b"),
        (ConductorConfig, "instance_id", ""),
        (GatewayConfig, "port", 65536),
        (GatewayConfig, "port", -1),
        (GatewayConfig, "bind", "localhost:7710"),
        (GatewayConfig, "bind", "tcp://127.0.0.1"),
        (GatewayConfig, "bind", "tcp://127.0.0.1:70000"),
        (GatewayConfig, "bind", "ipc://"),
        (GatewayConfig, "stream_bind", "ipc:///" + "x" * 107),
        (GatewayConfig, "conductor", "tcp://127.0.0.1:0"),
        (GatewayConfig, "conductor", "tcp://10.0.0.5:7700,10.0.0.6:7700"),
        (GatewayConfig, "conductor", "tcp://10.0.0.5:7700,"),
        (GatewayConfig, "conductor", "tcp://10.0.0.5:7700, tcp://10.0.0.5:7700"),
        (GatewayConfig, "request_deadline_s", -1.0),
        (GatewayConfig, "max_replacements", -1),
        (GatewayConfig, "model", "  "),
        (MessengerConfig, "arena_bytes", 1000),
        (MessengerConfig, "data_port", 70000),
        (MessengerConfig, "advertise_data", "10.0.0.7"),
        (MessengerConfig, "advertise_data", "tcp://10.0.0.7:7721"),
        (MessengerConfig, "advertise_data", "10.0.0.7:0"),
        (MessengerConfig, "tcp_connections", 0),
        (PrefillConfig, "chunk_tokens", 100),
        (PrefillConfig, "chunk_tokens", -16),
        (PrefillConfig, "block_tokens", 0),
        (DecodeConfig, "max_batch", 0),
        (DecodeConfig, "messenger", ""),
        (UpConfig, "prefill", 0),
        (UpConfig, "chunk_tokens", 8),
        (FakeConfig, "decode_s_base", -0.1),
        (FakeConfig, "layers", 0),
    ],
)
def test_bad_value_is_refused_by_name(cls: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        cls(**{field: value})


def test_rdma_cannot_be_encrypted_and_says_so() -> None:
    with pytest.raises(ValueError, match=r"^tcp_tls: transport rdma cannot encrypt"):
        MessengerConfig(transport=TransportKind.RDMA, tcp_tls=True)
    assert MessengerConfig(transport=TransportKind.AUTO, tcp_tls=True).tcp_tls


def test_a_messenger_may_be_reached_elsewhere_than_where_it_listens() -> None:
    assert MessengerConfig().advertised_data(7721) == ("127.0.0.1", 7721)
    assert MessengerConfig(advertise_data="kv.example:9000").advertised_data(7721) == ("kv.example", 9000)
    assert MessengerConfig(advertise_data="[2001:db8::7]:9000").advertised_data(7721) == ("2001:db8::7", 9000)


def test_unchunked_prefill_is_allowed() -> None:
    assert PrefillConfig(chunk_tokens=0).chunk_tokens == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "gateway.example", ""])
def test_reachable_http_address_needs_consent(host: str) -> None:
    with pytest.raises(ValueError, match=r"^host: .*keys"):
        GatewayConfig(host=host)
    assert GatewayConfig(host=host, allow_insecure_bind=True).host == host
    assert GatewayConfig(host=host, keys=Path("keys")).host == host


@pytest.mark.parametrize("endpoint", ["tcp://*:7710", "tcp://0.0.0.0:7710", "tcp://[::]:7710", "tcp://eth0:7710"])
def test_reachable_endpoint_needs_consent(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"^bind: .*keys"):
        DecodeConfig(bind=endpoint)
    assert DecodeConfig(bind=endpoint, allow_insecure_bind=True).bind == endpoint
    assert DecodeConfig(bind=endpoint, keys=Path("keys")).bind == endpoint


def test_exposed_addresses_are_named() -> None:
    gateway = GatewayConfig(host="0.0.0.0", stream_bind="tcp://10.0.0.5:1", allow_insecure_bind=True)
    assert exposed(gateway) == ["stream_bind=tcp://10.0.0.5:1", "host=0.0.0.0"]
    assert exposed(MessengerConfig(data_host="::", allow_insecure_bind=True)) == ["data_host=::"]
    assert exposed(ConductorConfig()) == []
    pipeline = PipelineConfig(stages=2, endpoints="tcp://10.0.0.6:1", data_host="10.0.0.5")
    assert exposed(PrefillConfig(pipeline=pipeline, allow_insecure_bind=True)) == ["pipeline.data_host=10.0.0.5"]
    with pytest.raises(ValueError, match="not rdma"):
        PipelineConfig(transport=TransportKind.RDMA)
    with pytest.raises(ValueError, match=r"pipeline\.data_host"):
        PrefillConfig(pipeline=pipeline)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:0", "tcp://127.8.9.1:7710", "tcp://[::1]:7710", "tcp://localhost:7710", "ipc:///tmp/a.ipc"],
)
def test_local_endpoint_is_fine(endpoint: str) -> None:
    assert DecodeConfig(bind=endpoint).bind == endpoint


def test_connecting_elsewhere_is_fine() -> None:
    assert GatewayConfig(conductor="tcp://10.0.0.5:7700").conductor == "tcp://10.0.0.5:7700"
    assert GatewayConfig(conductor="tcp://10.0.0.5:7700, tcp://10.0.0.6:7700")


def test_longest_socket_path_fits() -> None:
    path = "/" + "x" * 106
    assert DecodeConfig(bind=f"ipc://{path}").bind.endswith(path)


def test_messenger_data_address_needs_consent() -> None:
    with pytest.raises(ValueError, match=r"^data_host: .*keys"):
        MessengerConfig(data_host="10.0.0.5")
