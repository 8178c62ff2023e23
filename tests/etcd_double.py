"""A stand-in for etcd: its JSON gateway, as far as a leader uses it, in this process. And the real one, where it is.

Answers are what etcd 3.4 answers; ``tests/unit/test_conductor_etcd.py`` holds both against the same expectations.
"""

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

from mooncake_mesh.cli.up import dies_with

NO_ETCD: Final = "no etcd here: apt-get install etcd-server"
_START_S: Final = 20.0
_STALL_S: Final = 2.0


class EtcdDouble(ThreadingHTTPServer):
    """Context manager of one that answers at ``url``. While ``is_stalled`` its questions get no answer.

    With *tls* it takes nothing but that.
    """

    daemon_threads = False  # so that the end waits for every answer

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._lock = Lock()
        self._leases: dict[str, tuple[float, float]] = {}
        self._keys: dict[str, dict[str, str]] = {}
        self._revision = 1
        self.calls: list[str] = []
        self.is_stalled = False
        super().__init__(("127.0.0.1", 0), _Door)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server_address[1]}"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self._serving = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> "EtcdDouble":
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._serving.join()
        self.server_close()

    def delete_all(self) -> None:
        """What an operator may do by hand: every key goes, and leases stay."""
        with self._lock:
            self._keys.clear()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.calls.append(path)
            self._expire()
            handler = {
                "/v3/kv/range": self._range,
                "/v3/kv/txn": self._txn,
                "/v3/lease/grant": self._grant,
                "/v3/lease/keepalive": self._keep_alive,
                "/v3/lease/revoke": self._revoke,
            }.get(path)
            if handler is None:
                return 404, {"error": "Not Found", "code": 5}
            status, answer = handler(body)
            return status, {"header": {"revision": str(self._revision)}, **answer}

    def _expire(self) -> None:
        now_s = time.monotonic()
        self._leases = {lease: held for lease, held in self._leases.items() if now_s < held[0]}
        self._keys = {key: kv for key, kv in self._keys.items() if kv["lease"] in self._leases}

    def _range(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        found = self._keys.get(body["key"])
        return 200, {} if found is None else {"kvs": [found], "count": "1"}

    def _txn(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        (compare,), (success,) = body["compare"], body["success"]
        put = success["requestPut"]
        assert (compare["target"], compare["result"], compare["create_revision"]) == ("CREATE", "EQUAL", "0")
        if compare["key"] in self._keys:
            return 200, {}
        if put["lease"] not in self._leases:
            return 404, {"error": "etcdserver: requested lease not found", "code": 5}
        self._revision += 1
        self._keys[put["key"]] = {**put, "create_revision": str(self._revision)}
        return 200, {"succeeded": True}

    def _grant(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ttl_s = max(2.0, float(body["TTL"]))
        lease = str(7000 + len(self.calls))
        self._leases[lease] = (time.monotonic() + ttl_s, ttl_s)
        return 200, {"ID": lease, "TTL": f"{ttl_s:.0f}"}

    def _keep_alive(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        lease = body["ID"]
        if lease not in self._leases:
            return 200, {"result": {"ID": lease}}
        ttl_s = self._leases[lease][1]
        self._leases[lease] = (time.monotonic() + ttl_s, ttl_s)
        return 200, {"result": {"ID": lease, "TTL": f"{ttl_s:.0f}"}}

    def _revoke(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self._leases.pop(body["ID"], None) is None:
            return 404, {"error": "etcdserver: requested lease not found", "code": 5}
        self._revision += 1
        return 200, {}


class _Door(BaseHTTPRequestHandler):
    server: EtcdDouble

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.is_stalled:
            self.close_connection = True
            time.sleep(_STALL_S)
            return
        status, answer = self.server.answer(self.path, body)
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        """Not to stderr."""


@contextmanager
def real_etcd(folder: Path) -> Iterator[str]:
    """URL of an etcd of one member with its data in *folder*."""
    program = shutil.which("etcd")
    assert program is not None, NO_ETCD
    client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
            ],
            stdout=log,
            stderr=log,
            preexec_fn=dies_with(os.getpid()),
        )
    try:
        _wait_until_healthy(client)
        yield client
    finally:
        process.kill()
        process.wait()


def _wait_until_healthy(url: str) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1.0) as answer:
                if json.load(answer).get("health") == "true":
                    return
        except OSError:
            pass
        assert time.monotonic() < deadline_s, "etcd does not start"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
