"""API keys: only their hash is stored, only the whole key opens, and a tenant's limits hold for all of its keys."""

import json
import re
import stat
from pathlib import Path

import pytest

from mooncake_mesh.cli import keys as command
from mooncake_mesh.errors import ConfigError, Rejected
from mooncake_mesh.gateway import api_keys
from mooncake_mesh.gateway.rate_limits import TenantLimits, TenantRates, TokenBucket


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / api_keys.FILE_NAME


def test_a_key_opens_for_its_tenant(file: Path) -> None:
    shown = api_keys.add(file, "app", "acme", None)
    found = api_keys.read(file).find(shown)
    assert found is not None
    assert (found.name, found.tenant) == ("app", "acme")


def test_the_file_holds_no_key_and_is_its_owner_s_alone(file: Path) -> None:
    shown = api_keys.add(file, "app", "acme", None)
    secret = shown.rsplit("-", 1)[1]
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_nothing_but_the_whole_key_opens(file: Path) -> None:
    shown, other = api_keys.add(file, "app", "acme", None), api_keys.add(file, "other", "acme", None)
    keys = api_keys.read(file)
    mixed = shown[: shown.index("-", 3)] + other[other.index("-", 3) :]
    last = shown[:-1] + ("A" if shown[-1] != "A" else "B")
    for wrong in ("", "mk-", shown[:-1], shown + "x", shown.upper(), " " + shown, last, mixed, "mk-\udcff", "ü" * 60):
        assert keys.find(wrong) is None, wrong


def test_a_revoked_key_and_the_limits_of_a_tenant_without_keys_are_gone(file: Path) -> None:
    shown = api_keys.add(file, "app", "acme", TenantLimits(requests_per_minute=5))
    before = api_keys.state_of(file)
    api_keys.revoke(file, "app")
    assert api_keys.state_of(file) != before
    assert api_keys.read(file).find(shown) is None
    assert json.loads(file.read_text())["tenants"] == {}
    with pytest.raises(ConfigError, match="no API key app"):
        api_keys.revoke(file, "app")


def test_a_name_is_taken_once(file: Path) -> None:
    api_keys.add(file, "app", "acme", None)
    with pytest.raises(ConfigError, match="already"):
        api_keys.add(file, "app", "umbrella", None)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1, "keys": [{}], "tenants": {}}'])
def test_a_damaged_file_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        api_keys.read(file)


# --- the command ------------------------------------------------------------------------------------------------------


def keys_command(folder: Path, *argv: str) -> int:
    place = 2 if argv[0] == "api" else 1
    return command.run([*argv[:place], f"--keys={folder}", *argv[place:]])


def test_the_command_shows_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert keys_command(folder, "init") == 0
    capsys.readouterr()
    assert keys_command(folder, "api", "add", "app", "--tenant=acme", "--tokens-per-minute=1000") == 0
    shown = capsys.readouterr().out.strip()
    assert keys_command(folder, "api", "add", "app2", "--tenant=acme", "--requests-per-minute=7") == 0
    capsys.readouterr()
    known = api_keys.read(folder / api_keys.FILE_NAME)
    assert known.find(shown) is not None
    assert known.limits_of("acme") == TenantLimits(requests_per_minute=7, tokens_per_minute=1000)
    assert keys_command(folder, "api", "list") == 0
    listed = capsys.readouterr().out
    assert "app2  tenant=acme" in listed
    assert shown not in listed
    assert keys_command(folder, "api", "revoke", "app") == 0
    assert api_keys.read(folder / api_keys.FILE_NAME).find(shown) is None


def test_the_command_makes_and_lists_the_keys_of_a_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "keys", tmp_path / "out"
    assert keys_command(folder, "init", "--name=node0") == 0
    assert keys_command(folder, "issue", "node1", "--member", f"--out={out}") == 0
    capsys.readouterr()
    assert keys_command(folder, "show") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^members  \S{40}  node1$", printed, re.MULTILINE)
    assert "secret" not in printed
    assert keys_command(folder, "revoke", "node1") == 0
    assert keys_command(folder, "revoke", "node1") == 2
    assert "nobody is called node1" in capsys.readouterr().err


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_a_minute_s_worth_and_fills_evenly() -> None:
    bucket = TokenBucket(60, 0.0)
    assert [bucket.take(20, 0.0) for _ in range(4)] == [0, 0, 0, 20.0]
    assert bucket.take(20, 19.0) == pytest.approx(1.0)
    assert bucket.take(20, 20.0) == 0
    assert bucket.take(60, 10_000.0) == 0, "no more than a minute's worth is kept"
    assert bucket.take(1, 10_000.0) == pytest.approx(1.0)


def test_a_cost_beyond_the_bucket_is_due_when_it_is_full() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.take(90, 0.0) == 0
    assert bucket.take(1, 0.0) == pytest.approx(31.0)


def test_what_was_generated_is_paid_later() -> None:
    rates = TenantRates(lambda tenant: TenantLimits(tokens_per_minute=60 if tenant == "acme" else None))
    rates.take_tokens("acme", 10, 0.0)
    rates.charge_tokens("acme", 80, 0.0)
    with pytest.raises(Rejected, match="tenant_tokens_per_minute") as refused:
        rates.take_tokens("acme", 10, 0.0)
    assert refused.value.retry_after_s == pytest.approx(40.0)
    assert not refused.value.unavailable
    rates.take_tokens("umbrella", 1_000_000, 0.0)
    rates.take_tokens("acme", 10, 40.0)


def test_tenants_have_buckets_of_their_own_and_a_changed_limit_counts() -> None:
    limits = {"acme": TenantLimits(requests_per_minute=1), "umbrella": TenantLimits(requests_per_minute=1)}
    rates = TenantRates(limits.__getitem__)
    rates.take_request("acme", 0.0)
    rates.take_request("umbrella", 0.0)
    with pytest.raises(Rejected, match="tenant_requests_per_minute"):
        rates.take_request("acme", 1.0)
    limits["acme"] = TenantLimits(requests_per_minute=2)
    rates.take_request("acme", 1.0)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_at_least_one(limit: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TenantLimits(requests_per_minute=limit)
