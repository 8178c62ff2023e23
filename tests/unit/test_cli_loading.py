"""Defaults < file < environment < flags, one name everywhere, and refusals that say what and where from."""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.cli import values
from mooncake_mesh.cli.loading import load
from mooncake_mesh.cli.settings import add_flags, dump, flags_of, settings_of
from mooncake_mesh.cli.values import Unit
from mooncake_mesh.config import (
    SECTIONS,
    EngineKind,
    FakeConfig,
    FakeOutput,
    GatewayConfig,
    MessengerConfig,
    PrefillConfig,
    RoleConfig,
    UpConfig,
)
from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.errors import ConfigError
from mooncake_mesh.kv.layout import KvDtype


def _load(cls: type[RoleConfig], *argv: str, environ: Mapping[str, str] | None = None) -> RoleConfig:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser, cls)
    return load(cls, flags=parser.parse_args(argv), environ=environ or {})


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "mooncake.toml"


def test_nothing_given_means_defaults() -> None:
    assert _load(PrefillConfig) == PrefillConfig()


def test_later_sources_win(toml: Path) -> None:
    toml.write_text('[prefill]\nmodel = "file"\ndevice = "file"\ninstance_id = "file"\n[prefill.fake]\nlayers = 3\n')
    config = _load(
        PrefillConfig,
        f"--config={toml}",
        "--model=flag",
        environ={
            "MOONCAKE_PREFILL_MODEL": "env",
            "MOONCAKE_PREFILL_DEVICE": "env",
            "MOONCAKE_PREFILL_FAKE_HEAD_DIM": "4",
        },
    )
    assert isinstance(config, PrefillConfig)
    assert (config.model, config.device, config.instance_id, config.node_id) == ("flag", "env", "file", "node0")
    assert config.fake == FakeConfig(layers=3, head_dim=4)


@pytest.mark.parametrize("cls", SECTIONS.values())
def test_every_setting_has_one_name_everywhere(cls: type[RoleConfig], toml: Path) -> None:
    """A default that is given explicitly, by each source, changes nothing."""
    section = next(name for name, known in SECTIONS.items() if known is cls)
    toml.write_text(dump(cls()))
    shown = {setting: values.to_text(setting.unit, setting.default) for setting in settings_of(cls)}
    variables = {setting.variable(section): text for setting, text in shown.items() if text}
    flags = [
        setting.flag.replace("--", "--no-", 1) if setting.kind is bool else f"{setting.flag}={text}"
        for setting, text in shown.items()
        if text
    ]
    assert _load(cls, f"--config={toml}") == _load(cls, environ=variables) == _load(cls, *flags) == cls()


def test_every_kind_of_value_can_be_given() -> None:
    config = _load(
        UpConfig,
        *("--dtype=float32", "--arena-bytes=512MiB", "--run-dir=/tmp/x", "--prefill=2", "--allow-insecure-bind"),
        *("--fake-output=utf8", "--fake-decode-s-base=0.01"),
    )
    assert config == UpConfig(
        dtype=KvDtype.FLOAT32,
        arena_bytes=512 << 20,
        run_dir=Path("/tmp/x"),
        prefill=2,
        allow_insecure_bind=True,
        fake=FakeConfig(output=FakeOutput.UTF8, decode_s_base=0.01),
    )


def test_empty_text_unsets_what_may_be_unset(toml: Path) -> None:
    toml.write_text('[gateway]\nserved_model_name = "kimi"\n')
    config = _load(GatewayConfig, f"--config={toml}", environ={"MOONCAKE_GATEWAY_SERVED_MODEL_NAME": ""})
    assert config == GatewayConfig()


def test_toml_sizes_and_numbers(toml: Path) -> None:
    toml.write_text('[messenger]\narena_bytes = "2GiB"\ntcp_connections = 4\n')
    assert _load(MessengerConfig, f"--config={toml}") == MessengerConfig(arena_bytes=2 << 30, tcp_connections=4)
    toml.write_text("[messenger]\narena_bytes = 1048576\n")
    assert _load(MessengerConfig, f"--config={toml}") == MessengerConfig(arena_bytes=1 << 20)
    toml.write_text("[gateway]\nrequest_deadline_s = 5\n")
    assert _load(GatewayConfig, f"--config={toml}") == GatewayConfig(request_deadline_s=5.0)


def test_other_roles_tables_are_left_alone(toml: Path) -> None:
    toml.write_text("[decode]\nanything = true\n[prefill]\nthreads = 2\n[prefill.fake]\n")
    assert _load(PrefillConfig, f"--config={toml}") == PrefillConfig(threads=2)


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("[prefil]\n", "prefil", "did you mean prefill?"),
        ("threads = 1\n", "threads", "no such table"),
        ("prefill = 1\n", "prefill", "expected a table"),
        ("[prefill]\nthread = 1\n", "prefill.thread", "did you mean threads?"),
        ("[prefill]\nzzz = 1\n", "prefill.zzz", "there are instance_id, "),
        ("[prefill.fake]\nlayer = 1\n", "prefill.fake.layer", "did you mean fake.layers?"),
        ("[prefill.other]\n", "prefill.other", "no such setting"),
        ("[prefill]\nfake = 1\n", "prefill.fake", "no such setting"),
        ('[prefill]\nthreads = "1"\n', "prefill.threads", "expected an integer, got '1'"),
        ("[prefill]\nthreads = 1.0\n", "prefill.threads", "expected an integer"),
        ("[prefill]\nthreads = true\n", "prefill.threads", "expected an integer"),
        ("[prefill]\nthreads = -1\n", "prefill.threads", "must be at least 0"),
        ("[prefill]\nmodel = 1\n", "prefill.model", "expected a string"),
        ("[prefill]\nmodel = 2020-01-01\n", "prefill.model", "expected a string"),
        ('[prefill]\ndtype = "fp8"\n', "prefill.dtype", "expected one of float32, bfloat16, got 'fp8'"),
        ("[prefill]\ndtype = 1\n", "prefill.dtype", "expected one of float32, bfloat16"),
        ('[prefill]\nallow_insecure_bind = "yes"\n', "prefill.allow_insecure_bind", "expected true or false"),
        ("[prefill.fake]\ndecode_s_base = true\n", "prefill.fake.decode_s_base", "expected a number"),
        ("[prefill.fake]\ndecode_s_base = inf\n", "prefill.fake.decode_s_base", "expected a finite number"),
        ("[prefill.fake]\nlayers = 0\n", "prefill.fake.layers", "must be at least 1"),
        ("[prefill]\nchunk_tokens = 100\n", "prefill.chunk_tokens", "multiple of block_tokens (16)"),
    ],
)
def test_bad_file_is_refused(toml: Path, text: str, path: str, said: str) -> None:
    toml.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        _load(PrefillConfig, f"--config={toml}")
    assert refusal.value.path == path
    assert said in str(refusal.value)
    assert str(toml) in str(refusal.value)


@pytest.mark.parametrize("content", [b"[prefill", b"\xff\xfe"])
def test_what_is_not_toml_is_refused(toml: Path, content: bytes) -> None:
    toml.write_bytes(content)
    with pytest.raises(ConfigError, match="is not TOML"):
        _load(PrefillConfig, f"--config={toml}")


def test_missing_file_is_refused(toml: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        _load(PrefillConfig, f"--config={toml}")


@pytest.mark.parametrize(
    ("variable", "text", "path", "said"),
    [
        ("MOONCAKE_MESSENGER_ARENA", "1GiB", "messenger.arena", "did you mean arena_bytes?"),
        ("MOONCAKE_MESSENGER_ARENA_BYTES", "1 potato", "messenger.arena_bytes", "expected a size such as 512MiB"),
        ("MOONCAKE_MESSENGER_ARENA_BYTES", "0.3KiB", "messenger.arena_bytes", "no whole number of bytes"),
        ("MOONCAKE_MESSENGER_DATA_PORT", "", "messenger.data_port", "expected an integer"),
        ("MOONCAKE_MESSENGER_TRANSPORT", "ib", "messenger.transport", "expected one of auto, shm, tcp, rdma"),
        ("MOONCAKE_MESSENGER_ALLOW_INSECURE_BIND", "maybe", "messenger.allow_insecure_bind", "expected true or false"),
        ("MOONCAKE_MESSENGER_RUN_DIR", "/tmp/\udcff", "messenger.run_dir", "valid UTF-8"),
        ("MOONCAKE_MESSENGER_BIND", "tcp://*:1", "messenger.bind", "keys"),
    ],
)
def test_bad_variable_is_refused(variable: str, text: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _load(MessengerConfig, environ={variable: text})
    assert refusal.value.path == path
    assert said in str(refusal.value)
    assert f"(from {variable})" in str(refusal.value)


def test_variables_of_other_roles_are_left_alone() -> None:
    assert _load(MessengerConfig, environ={"MOONCAKE_GATEWAY_NONSENSE": "1", "MOONCAKE": "1"}) == MessengerConfig()


def test_bad_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^gateway\.port: expected an integer, got 'x' \(from --port\)$"):
        _load(GatewayConfig, "--port=x")


def test_printed_configuration_loads_again(toml: Path) -> None:
    config = UpConfig(
        model='odd "name" \\ äöü 🙂',
        engine=EngineKind.FAKE,
        arena_bytes=(3 << 20) + 1,
        run_dir=Path("/tmp/with space"),
        fake=FakeConfig(decode_s_base=1e-5),
        allow_insecure_bind=True,
    )
    toml.write_text(dump(config))
    assert _load(UpConfig, f"--config={toml}") == config


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_string_survives_toml(text: str) -> None:
    assert tomllib.loads(f"x = {values.to_toml(Unit.PLAIN, text)}") == {"x": text}


@given(size=st.integers(0, 1 << 60))
def test_any_size_survives_text(size: int) -> None:
    assert values.size_from_text(values.size_to_text(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2gb", 2_000_000_000), ("7B", 7), ("1tib", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert values.size_from_text(text) == size


def test_flags_for_a_child_read_back() -> None:
    given_fields = {"model": "-odd", "threads": 2, "allow_insecure_bind": False, "fake": FakeConfig(layers=5)}
    flags = flags_of(PrefillConfig, given_fields)
    assert _load(PrefillConfig, *flags) == PrefillConfig(**given_fields)  # type: ignore[arg-type]


def test_variables_of_mooncakes_transfer_engine_are_taken_and_ours_win(tmp_path: Path) -> None:
    environ = {"MC_GID_INDEX": "3", "MC_MTU": "1024", "MC_CUSTOM_TOPO_JSON": str(tmp_path), "MC_SLICE_SIZE": "65536"}
    config = _load(MessengerConfig, environ=environ)
    assert isinstance(config, MessengerConfig)
    assert config.rdma == RdmaConfig(gid_index=3, mtu=1024, topology=tmp_path, slice_bytes=65536)
    config = _load(MessengerConfig, environ=environ | {"MOONCAKE_MESSENGER_RDMA_GID_INDEX": "5"})
    assert isinstance(config, MessengerConfig)
    assert config.rdma.gid_index == 5


def test_a_bad_alias_is_named_where_it_counts() -> None:
    with pytest.raises(ConfigError, match=r"^messenger\.rdma\.mtu: .* \(from MC_MTU\)"):
        _load(MessengerConfig, environ={"MC_MTU": "1500"})
    assert _load(GatewayConfig, environ={"MC_MTU": "1500"}) == GatewayConfig()
