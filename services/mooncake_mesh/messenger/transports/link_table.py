"""The links of one listener: at most one for each sender, and what happens when a sender connects again."""

import asyncio
from collections.abc import Callable

from mooncake_mesh.messenger.transports.inbound import InboundLink


class LinkTable:
    """The links of one listener, by sender."""

    def __init__(self) -> None:
        self._links: dict[bytes, InboundLink] = {}
        self._ending: set[InboundLink] = set()

    @property
    def n_connections(self) -> int:
        return sum(link.n_connections for link in (*self._links.values(), *self._ending))

    def get(self, sender: bytes) -> InboundLink | None:
        return self._links.get(sender)

    def introduce(self, sender: bytes, make: Callable[["asyncio.Future[None] | None"], InboundLink]) -> InboundLink:
        """Take in the link that *make* makes after the end of the sender's former one, which is taken down.

        What the sender sends again finds its places free only when all writes of the former link are over, so it may
        be welcomed no sooner: see :meth:`InboundLink.when_former_ended`.
        """
        former = self._links.pop(sender, None)
        link = self._links[sender] = make(former.ended if former is not None else None)
        link.ended.add_done_callback(lambda _: self._forget(sender, link))
        if former is not None:
            self._ending.add(former)
            former.die("the sender opened another link")
        return link

    async def close(self) -> None:
        """End all links. Returns when no lane is at work any more."""
        for link in self._links.values():
            link.die("the listener was closed")
        ended = [link.ended for link in (*self._links.values(), *self._ending)]
        if ended:
            await asyncio.wait(ended)

    def _forget(self, sender: bytes, link: InboundLink) -> None:
        self._ending.discard(link)
        if self._links.get(sender) is link:
            del self._links[sender]
