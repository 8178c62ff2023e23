"""Copies of one layer's K and V between an arena's pages and contiguous tensors.

A block is a page; pages that lie behind each other are copied at once, so that a thread that copies needs the
interpreter rarely.
"""

from collections.abc import Iterator, Sequence

import torch


def read_positions(
    pages: torch.Tensor, layer: int, blocks: Sequence[int], start: int, end: int, out: torch.Tensor
) -> None:
    """Positions *start* to *end* of a sequence in *blocks* into *out* (2, kv_heads, end - start, head_dim).

    *pages* is (blocks, layers, 2, block_tokens, kv_heads, head_dim).
    """
    for at, run in _runs(pages, layer, blocks, start, end):
        rows = out[:, :, at - start : at - start + run.shape[0] * run.shape[2]]
        rows.unflatten(2, (run.shape[0], run.shape[2])).copy_(run.permute(1, 3, 0, 2, 4))


def write_positions(pages: torch.Tensor, layer: int, blocks: Sequence[int], start: int, kv: torch.Tensor) -> None:
    """*kv* (2, kv_heads, tokens, head_dim) to positions *start* onwards: the reverse of :func:`read_positions`."""
    for at, run in _runs(pages, layer, blocks, start, start + kv.shape[2]):
        rows = kv[:, :, at - start : at - start + run.shape[0] * run.shape[2]]
        run.copy_(rows.unflatten(2, (run.shape[0], run.shape[2])).permute(2, 0, 3, 1, 4))


def _runs(
    pages: torch.Tensor, layer: int, blocks: Sequence[int], start: int, end: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """First position, and view (blocks, 2, tokens, kv_heads, head_dim), of each piece that lies in a row: parts of one
    block, or whole ones behind each other."""
    block_tokens = pages.shape[3]
    at = start
    while at < end:
        index, offset = divmod(at, block_tokens)
        if offset or end - at < block_tokens:
            tokens = min(block_tokens - offset, end - at)
            yield at, pages[blocks[index], layer, :, offset : offset + tokens][None]
            at += tokens
            continue
        last = index + (end - at) // block_tokens
        count = 1
        while index + count < last and blocks[index + count] == blocks[index] + count:
            count += 1
        yield at, pages[blocks[index] : blocks[index] + count, layer]
        at += count * block_tokens
