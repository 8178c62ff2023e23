"""Sends a workload to a server when its requests are due, and hears the answers out."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from mooncake_mesh.loadtest.mesh_counters import MeshCounters, read_counters
from mooncake_mesh.loadtest.outcomes import Ending, RequestResult
from mooncake_mesh.loadtest.stream_client import NoServer, StreamClient, Target
from mooncake_mesh.loadtest.workloads import LoadRequest

_ACCOUNTS_S: Final = 5.0
_ASK_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """``max_context_tokens`` is None where the server does not tell."""

    name: str
    max_context_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``max_concurrency`` None: a request is sent when it is due, however many run. ``timeout_s`` is for each."""

    model: str
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """Results in the order of the requests; ``mesh`` is what the mesh counted meanwhile, None for other servers."""

    results: tuple[RequestResult, ...]
    mesh: MeshCounters | None


Progress = Callable[[RequestResult], None]


async def served_model(target: Target, name: str | None) -> ServedModel:
    """The model *name*, or the only one that is served. Raises NoServer."""
    client = StreamClient(target, monotonic)
    try:
        cards = json.loads(await client.get("/v1/models"))["data"]
        models = {
            card["id"]: ServedModel(name=card["id"], max_context_tokens=card.get("max_model_len")) for card in cards
        }
    except (ValueError, LookupError, TypeError) as error:
        raise NoServer(f"{target.base_url}/v1/models: not a list of models: {error!r}") from error
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name not in models:
        raise NoServer(
            f"{target.base_url} serves {', '.join(models) or 'no model'}" + (f", not {name}" if name else "")
        )
    return models[name]


async def drive(target: Target, requests: Sequence[LoadRequest], plan: Plan, progress: Progress) -> LoadRun:
    """Send *requests*, in order of arrival; *progress* hears each result when it is over. Raises NoServer."""
    started_s = monotonic()
    client = StreamClient(target, lambda: monotonic() - started_s)
    before = await _counters(client)
    started_s = monotonic()
    slots = None if plan.max_concurrency is None else asyncio.Semaphore(plan.max_concurrency)
    results = [RequestResult(sent_s=0.0, input_tokens=request.input_tokens) for request in requests]
    try:
        async with asyncio.TaskGroup() as tasks:
            for request, result in zip(requests, results, strict=True):
                prompt = request.prompt()  # before it is due: making tokens is no part of what is measured
                await asyncio.sleep(max(0.0, request.arrival_s - (monotonic() - started_s)))
                if slots is not None:
                    await slots.acquire()
                tasks.create_task(_one(client, request, prompt, plan, result, slots, progress))
        mesh = None if before is None else await _counted(client, before, results)
    finally:
        await client.aclose()
    return LoadRun(results=tuple(results), mesh=mesh)


async def _one(
    client: StreamClient,
    request: LoadRequest,
    prompt: list[int],
    plan: Plan,
    result: RequestResult,
    slots: asyncio.Semaphore | None,
    progress: Progress,
) -> None:
    body = {
        "model": plan.model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": plan.temperature,
        "return_token_ids": True,
    }
    try:
        async with asyncio.timeout(plan.timeout_s):
            await client.complete(body, result)
    except TimeoutError:
        result.ending, result.reason = Ending.FAILED, f"no answer within {plan.timeout_s:g} s"
    finally:
        if slots is not None:
            slots.release()
        progress(result)


async def _counters(client: StreamClient) -> MeshCounters | None:
    """None where ``/metrics`` is not told, or not a mesh's."""
    try:
        return read_counters((await client.get("/metrics")).decode())
    except NoServer:
        return None


async def _counted(client: StreamClient, before: MeshCounters, results: Sequence[RequestResult]) -> MeshCounters | None:
    """What the mesh counted during the run: gateways tell the conductor of ended requests a little later."""
    deadline_s = monotonic() + _ACCOUNTS_S
    while True:
        now = await _counters(client)
        counted = None if now is None else now - before
        if counted is None or counted.ended >= len(results) or monotonic() >= deadline_s:
            return counted
        await asyncio.sleep(_ASK_EVERY_S)
