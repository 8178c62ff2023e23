"""A scripted gateway that real clients of HTTP can talk to."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import uvicorn

from tests.unit.gateway_doubles import Gateway, says


class Served:
    """A gateway behind a real HTTP server in a thread of its own."""

    def __init__(self) -> None:
        self.gateway = Gateway(says("Hello, world"))
        config = uvicorn.Config(
            self.gateway.app, host="127.0.0.1", port=0, http="httptools", log_config=None, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="gateway")
        self._thread.start()

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        """OpenAI's own client, of a mesh that answers "Hello, world" unless told otherwise."""
        self.gateway.mesh.script = says("Hello, world", cached=16)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0) as client:
            yield client

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()
        self.gateway.completions.close()
