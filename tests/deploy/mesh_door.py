"""The gateway of a deployed mesh, asked over HTTP with nothing but the standard library."""

import json
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """``api_key`` None: the mesh asks for none."""

    url: str
    api_key: str | None = None

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._request(path), timeout=20) as answer:
            return str(answer.read().decode())

    def status_of(self, path: str) -> int:
        """HTTP status of an answer to somebody without a key."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def chat(self, text: str, max_tokens: int = 8) -> dict[str, Any]:
        """A whole answer. Raises OSError (HTTPError among them) where there is none."""
        body = {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "seed": 1}
        with urllib.request.urlopen(self._request("/v1/chat/completions", body), timeout=120) as answer:
            said: dict[str, Any] = json.load(answer)
            return said

    def answers(self, text: str, max_tokens: int = 8) -> bool:
        """Whether a chat is answered whole. False is a 503: nobody can serve it now, so a client comes back.

        That is what a conductor says which has just begun, until the workers have told it that they are there, which
        takes them a heartbeat. ``/ready`` is what the gateway last heard, so it may still tell of the one before.
        """
        try:
            return bool(self.chat(text, max_tokens)["usage"]["completion_tokens"] == max_tokens)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False

    def _request(self, path: str, body: object = None) -> urllib.request.Request:
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode())
        if self.api_key is not None:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        return request


@dataclass(slots=True)
class Load:
    """Requests one after the other in *n_clients* threads, for as long as this context lasts; ``failures`` stay."""

    door: Door
    n_clients: int = 3
    max_tokens: int = 24
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self.n_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            try:
                answer = self.door.chat(f"client {client}, turn {turn}: what is a KVCache?", self.max_tokens)
            except OSError as error:
                body = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                self.failures.append(f"client {client}, turn {turn}: {error} {body}")
                continue
            if answer["usage"]["completion_tokens"] != self.max_tokens:
                self.failures.append(f"client {client}, turn {turn}: {answer['usage']}")
            self.answered += 1
