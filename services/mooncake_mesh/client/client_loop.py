"""The thread of a synchronous client: an event loop with an asynchronous client in it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from mooncake_mesh.client.aio import MooncakeClient
from mooncake_mesh.errors import PeerUnreachable
from mooncake_mesh.mesh.crew import tell

R = TypeVar("R")

_CLOSED: Final = "the client was closed"


class _Call(Generic[R]):
    """*work* in the loop, for one who may leave at any moment: also while it is being handed over."""

    def __init__(self, work: Coroutine[Any, Any, R]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._is_left = False

    async def run(self) -> R:
        if self._is_left:
            self._work.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._work

    def leave(self) -> None:
        """Nobody waits any more. Nothing happens where it is over. In the loop."""
        self._is_left = True
        if self._task is not None:
            self._task.cancel()


class ClientLoop:
    """A thread that runs an event loop and one client in it."""

    def __init__(self, make: Callable[[], MooncakeClient]) -> None:
        self._started: concurrent.futures.Future[MooncakeClient] = concurrent.futures.Future()
        # A daemon, so that a program whose client was never closed can end.
        self._thread = threading.Thread(target=self._main, args=(make,), name="mooncake-client", daemon=True)
        self._lock = threading.Lock()
        self._is_open = True
        self._thread.start()
        try:
            self.client = self._started.result()
        except BaseException:
            self._thread.join()
            raise

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run *work* in the loop; an exception here, such as KeyboardInterrupt, cancels it."""
        call = _Call(work)
        try:
            with self._lock:
                if not self._is_open:
                    work.close()
                    raise PeerUnreachable(_CLOSED)
                future = asyncio.run_coroutine_threadsafe(call.run(), self._loop)
            return future.result()
        except concurrent.futures.CancelledError:
            raise PeerUnreachable(_CLOSED) from None
        except BaseException:
            tell(self._loop, call.leave)
            raise

    def close(self) -> None:
        """End the thread. From any thread, any number of times."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _main(self, make: Callable[[], MooncakeClient]) -> None:
        asyncio.run(self._serve(make))

    async def _serve(self, make: Callable[[], MooncakeClient]) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        try:
            client = make()
        except BaseException as error:  # noqa: BLE001  raised where the client is made
            self._started.set_exception(error)
            return
        async with client:
            self._started.set_result(client)
            await self._closing.wait()
