"""Grammars of the jobs of one worker: compiled on a thread of their own, and kept while they are asked for."""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mooncake_mesh.engine.api import TokenFilter, Vocabulary
from mooncake_mesh.engine.grammar import CompiledGrammar, GrammarCompiler
from mooncake_mesh.errors import InternalError, MooncakeError
from mooncake_proto.grammar import Grammar

_MAX_KEPT: Final = 64


class Grammars:
    """The last grammars that jobs came with. Used on the loop only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = GrammarCompiler(vocabulary)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[Grammar, asyncio.Future[CompiledGrammar]] = OrderedDict()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, grammar: Grammar | None) -> None:
        """Compile *grammar* now: somebody will ask for its filter soon."""
        if grammar is not None:
            self._begun(grammar)

    async def filter(self, grammar: Grammar | None) -> TokenFilter | None:
        """For one sequence; None where everything is allowed. Raises InvalidRequest for a grammar that is none."""
        return None if grammar is None else (await asyncio.shield(self._begun(grammar))).filter()

    def _begun(self, grammar: Grammar) -> "asyncio.Future[CompiledGrammar]":
        known = self._compiled.get(grammar)
        if known is None:
            loop = asyncio.get_running_loop()
            known = loop.run_in_executor(self._thread, _compile, self._compiler, grammar)
            known.add_done_callback(_heard)
            self._compiled[grammar] = known
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known


def _compile(compiler: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
    try:
        return compiler.compile(grammar)
    except MooncakeError:
        raise
    except BaseException as error:  # one job's grammar: a panic of the library is no Exception, and ends only this job
        raise InternalError(f"the grammar could not be compiled: {type(error).__name__}") from error


def _heard(future: "asyncio.Future[CompiledGrammar]") -> None:
    """A failure that nobody has asked for yet is no loose end."""
    if not future.cancelled():
        future.exception()
