"""From logits to tokens.

Order of the rules for one row, as in OpenAI-compatible servers: log-probabilities are taken from the raw logits, before
anything below touches them; biases; repetition penalty (prompt and drawn tokens), frequency and presence penalties
(drawn tokens only); banned ids, and what a grammar rules out; then greedy, or temperature, min_p, top_k, top_p and a
draw by inverse CDF in order of token id.

Every row is worked out by itself, so a draw never depends on its batch.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from mooncake_mesh.engine.api import Drawn, SampleRequest, TokenMask
from mooncake_mesh.engine.philox import uniform
from mooncake_mesh.errors import ModelError
from mooncake_proto.serving import Sampling, TokenLogprob

# top_p needs the probabilities sorted; the most likely tokens nearly always hold the mass, and a partial sort of a
# vocabulary is many times cheaper than a whole one.
_NUCLEUS_CANDIDATES: Final = (256, 4096)


def draw(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Drawn]:
    """One token for every row of *logits* (rows, vocabulary), which is not changed.

    Raises ModelError when a row holds NaN, or nothing but -inf.
    """
    rows = logits.float()
    best, best_ids = rows.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise ModelError("the model's logits are not finite")
    greedy = best_ids.tolist()
    return [
        _plain_greedy(greedy[i]) if _is_plain(request) else draw_row(rows[i], request)
        for i, request in enumerate(requests)
    ]


def draw_row(logits: torch.Tensor, request: SampleRequest) -> Drawn:
    """One token from finite float32 *logits* (vocabulary), which are not changed."""
    sampling = request.sampling
    adjusted = penalised(logits, request)
    if sampling.temperature <= 0.0:
        token = int(adjusted.argmax())
    else:
        token = _inverse_cdf(
            kept_logits(adjusted / sampling.temperature, sampling), uniform(sampling.seed, request.position)
        )
    return Drawn(token=token, logprob=token_logprob(logits, token, sampling.top_logprobs))


def penalised(logits: torch.Tensor, request: SampleRequest) -> torch.Tensor:
    """*logits* after biases, penalties, bans and filter; the same tensor when none applies, a new one otherwise."""
    sampling = request.sampling
    allowed = request.allowed()
    has_rules = _has_penalties(sampling) or bool(sampling.logit_bias)
    if allowed is not None and not has_rules:
        return _only(allowed, logits)
    if not (has_rules or request.banned):
        return logits
    result = logits.clone()
    if sampling.logit_bias:
        known = [(token, bias) for token, bias in sampling.logit_bias if token < logits.numel()]
        ids, biases = zip(*known, strict=True) if known else ((), ())
        result[_ids(np.array(ids), logits)] += torch.tensor(biases, dtype=result.dtype, device=result.device)
    if sampling.repetition_penalty != 1.0 and len(request.history):
        seen = _ids(np.unique(request.history), logits)
        values = result[seen]
        scale = sampling.repetition_penalty
        result[seen] = torch.where(values > 0, values / scale, values * scale)
    if request.position and (sampling.frequency_penalty or sampling.presence_penalty):
        unique, counts = np.unique(request.history[-request.position :], return_counts=True)
        penalty = sampling.frequency_penalty * counts + sampling.presence_penalty
        result[_ids(unique, logits)] -= torch.as_tensor(penalty, dtype=result.dtype, device=result.device)
    if allowed is not None:
        return _only(allowed, result)
    if request.banned:
        result[list(request.banned)] = float("-inf")
    return result


def _only(allowed: TokenMask, logits: torch.Tensor) -> torch.Tensor:
    """*logits* of the *allowed* tokens; -inf for all others."""
    return torch.where(torch.from_numpy(allowed[: logits.numel()]).to(logits.device), logits, float("-inf"))


def kept_logits(scaled: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """*scaled* (logits over temperature) with -inf where min_p, top_k or top_p rule a token out."""
    if sampling.min_p > 0.0:
        floor = scaled.max() + float(np.log(sampling.min_p))
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if 0 < sampling.top_k < scaled.numel():
        values, ids = _most_likely(scaled, sampling.top_k)
        scaled = torch.full_like(scaled, float("-inf")).scatter_(0, ids, values)
    if sampling.top_p < 1.0:
        scaled = _nucleus(scaled, sampling.top_p)
    return scaled


def token_logprob(logits: torch.Tensor, token: int, top_logprobs: int | None) -> TokenLogprob | None:
    """Log-softmax of the raw *logits* at *token*, and the *top_logprobs* largest; None when not asked for."""
    if top_logprobs is None:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if top_logprobs > 0:
        values, ids = _most_likely(logprobs, min(top_logprobs, logprobs.numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(logprob=float(logprobs[token]), top=top)


def _nucleus(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches *top_p*; always at least one."""
    total = torch.logsumexp(scaled.double(), dim=-1)
    vocabulary = scaled.numel()
    for candidates in (*(few for few in _NUCLEUS_CANDIDATES if few < vocabulary), vocabulary):
        values, ids = _most_likely(scaled, candidates)
        mass_before = torch.cumsum(torch.exp(values.double() - total), dim=-1).roll(1)
        mass_before[0] = 0.0
        kept = mass_before < top_p
        kept[0] = True
        if not bool(kept[-1]):
            break
    return torch.full_like(scaled, float("-inf")).scatter_(0, ids[kept], values[kept])


def _most_likely(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The *count* largest values and their ids, largest first; among equal values the smaller id wins.

    topk alone leaves the choice among ties open, and ties are common in bfloat16.
    """
    if count == values.numel():
        return torch.sort(values, descending=True, stable=True)
    largest, ids = torch.topk(values, count)
    lowest = largest[-1]
    if int((values >= lowest).sum()) > count:
        above = ids[largest > lowest]
        ties = torch.nonzero(values == lowest).flatten()[: count - above.numel()]
        ids = torch.cat((above, ties))
        largest = values[ids]
    by_id = torch.argsort(ids)
    order = by_id[torch.argsort(largest[by_id], descending=True, stable=True)]
    return largest[order], ids[order]


def _inverse_cdf(logits: torch.Tensor, quantile: float) -> int:
    """Token at *quantile* in [0, 1) of the softmax of *logits*, tokens in order of id; never one of probability 0."""
    weights = torch.exp(logits.double() - logits.max().double())
    cdf = torch.cumsum(weights, dim=-1)
    target = quantile * float(cdf[-1])
    index = int(torch.searchsorted(cdf, target, right=True))
    if index >= cdf.numel() or not float(weights[index]) > 0.0:  # rounding took the target to the very end
        index = int(torch.nonzero(weights)[-1])
    return index


def _ids(ids: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.long, device=like.device)


def _has_penalties(sampling: Sampling) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _is_plain(request: SampleRequest) -> bool:
    """Whether the row's largest logit is the answer."""
    sampling = request.sampling
    return (
        sampling.temperature <= 0.0
        and sampling.top_logprobs is None
        and request.filter is None
        and not sampling.logit_bias
        and not request.banned
        and not _has_penalties(sampling)
    )


def _plain_greedy(token: int) -> Drawn:
    return Drawn(token=token)
