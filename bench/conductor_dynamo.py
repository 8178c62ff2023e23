"""Dynamo's RadixTree in an interpreter of its own, timed in processor time. The first line on stdin has chains and
holders as JSON, and is answered by a line; each further one by the seconds of a match, on average over all chains.

It is started by bench.conductor with the interpreter of an environment that has ai-dynamo-runtime and nothing of ours.
"""

import json
import sys
from time import process_time

from dynamo._core import RadixTree


def main() -> None:
    question = json.loads(sys.stdin.readline())
    chains, holders = question["chains"], question["holders"]
    tree = RadixTree()
    events = [(worker, _stored(number, chains[chain][:depth])) for number, (worker, chain, depth) in enumerate(holders)]
    started_s = process_time()
    for worker, event in events:
        tree.apply_event(worker, event)
    insert_s = (process_time() - started_s) / len(events)
    matches = [{str(worker[0]): depth for worker, depth in tree.find_matches(c).scores.items()} for c in chains]
    print(json.dumps({"insert_s": insert_s, "matches": matches}), flush=True)
    for _ in sys.stdin:
        started_s = process_time()
        for chain in chains:
            tree.find_matches(chain)
        print((process_time() - started_s) / len(chains), flush=True)


def _stored(number: int, hashes: list[int]) -> bytes:
    blocks = [{"block_hash": value, "tokens_hash": value} for value in hashes]
    return json.dumps({"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}).encode()


if __name__ == "__main__":
    main()
