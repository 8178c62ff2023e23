"""What users build on: names, codes and commands that may not change by accident."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake_mesh.client
import mooncake_mesh.errors
from mooncake_mesh.client.caching import Caching, CachingTags
from mooncake_mesh.client.sync_caching import SyncCaching, SyncCachingTags
from mooncake_mesh.config import SECTIONS
from mooncake_mesh.errors import MooncakeError
from mooncake_proto.control import Role
from mooncake_proto.errors import WireError

CODES = {
    "Aborted": "aborted",
    "CallTimeout": "call_timeout",
    "ChecksumMismatch": "checksum_mismatch",
    "ConfigError": "config_error",
    "DeadlineExceeded": "deadline_exceeded",
    "DecodeRefused": "decode_refused",
    "Draining": "draining",
    "InternalError": "internal_error",
    "InvalidApiKey": "invalid_api_key",
    "InvalidRequest": "invalid_request",
    "InvalidTransition": "invalid_transition",
    "InvariantViolated": "invariant_violated",
    "KeyRefused": "key_refused",
    "MalformedMessage": "malformed_message",
    "MeshError": "mesh_error",
    "ModelError": "model_error",
    "ModelNotFound": "model_not_found",
    "MooncakeError": "internal_error",
    "NoFreeBlocks": "no_free_blocks",
    "NotLeader": "not_leader",
    "PeerUnreachable": "peer_unreachable",
    "Refused": "mesh_error",
    "Rejected": "rejected",
    "RemoteFailure": "mesh_error",
    "RequestError": "request_error",
    "SliceLost": "slice_lost",
    "SlowReader": "slow_reader",
    "TooLate": "too_late",
    "TooLong": "context_length_exceeded",
    "TransferError": "transfer_error",
    "UnknownKind": "unknown_kind",
    "UnsupportedModel": "unsupported_model",
    "VersionMismatch": "version_mismatch",
    "WireError": "wire_error",
}


SDK = {
    "RequestTrace",
    "TraceStep",
    "CacheError",
    "CacheTag",
    "ContextCache",
    "DEFAULT_ENDPOINT",
    "Aborted",
    "AnswerStream",
    "CallTimeout",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "DeadlineExceeded",
    "Delta",
    "Draining",
    "HealthReport",
    "InvalidApiKey",
    "InvalidRequest",
    "KeyRefused",
    "MeshError",
    "Model",
    "ModelNotFound",
    "MooncakeClient",
    "MooncakeError",
    "PeerUnreachable",
    "Rejected",
    "RemoteFailure",
    "RequestError",
    "SlowReader",
    "SyncAnswerStream",
    "SyncMooncakeClient",
    "Timeouts",
    "TooLong",
    "ToolCall",
    "Usage",
    "WireError",
}


def test_error_codes_travel_so_they_stay() -> None:
    families = [MooncakeError]
    for family in families:
        families.extend(family.__subclasses__())
    ours = {error.__name__: error.code for error in families if error.__module__.startswith("mooncake")}
    public = {name: ours[name] for name in [*mooncake_mesh.errors.__all__, *_names_of(WireError)] if name in ours}
    assert public == CODES


def test_all_names_what_is_there() -> None:
    assert all(hasattr(mooncake_mesh.errors, name) for name in mooncake_mesh.errors.__all__)


def test_the_sdk_exports_what_it_promises_and_nothing_else() -> None:
    modules = {"aio", "answers", "caching", "caching_answers", "client_loop", "failures", "options", "sync"}
    modules |= {"sync_caching", "timeouts"}
    there = {name for name in vars(mooncake_mesh.client) if not name.startswith("_")}
    assert there - modules == set(mooncake_mesh.client.__all__) == SDK


@pytest.mark.parametrize("name", ["chat", "stream_chat", "generate", "stream", "models", "health", "close"])
def test_both_clients_have_the_same_calls(name: str) -> None:
    plain, asynchronous = (
        inspect.signature(getattr(client, name)).parameters
        for client in (mooncake_mesh.client.SyncMooncakeClient, mooncake_mesh.client.MooncakeClient)
    )
    assert plain == asynchronous


def test_both_clients_have_the_same_calls_for_caches_and_tags() -> None:
    for plain, asynchronous in ((SyncCaching, Caching), (SyncCachingTags, CachingTags)):
        names = [name for name in vars(asynchronous) if not name.startswith("_")]
        assert names == [name for name in vars(plain) if not name.startswith("_")]
        for name in names:
            assert [inspect.signature(getattr(calls, name)).parameters for calls in (plain, asynchronous)] == [
                inspect.signature(getattr(asynchronous, name)).parameters
            ] * 2


def test_every_role_of_the_wire_is_a_command() -> None:
    further_stage = {Role.STAGE.value}  # mooncake prefill --pipeline-stage N
    assert {role.value for role in Role} - further_stage <= set(SECTIONS)


@pytest.mark.parametrize("module", ["mooncake_mesh.client", "mooncake_mesh.__main__"])
def test_clients_and_the_command_line_load_no_model_code(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'tokenizers'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_both_packages_are_marked_as_typed() -> None:
    root = Path(__file__).parents[1]
    assert (root / "proto/mooncake_proto/py.typed").exists()
    assert (root / "services/mooncake_mesh/py.typed").exists()


def _names_of(family: type[Exception]) -> list[str]:
    return [family.__name__, *[leaf.__name__ for leaf in family.__subclasses__()]]
