"""Dynamo's RadixTree in an interpreter of its own, timed: reads JSON questions from stdin, answers on stdout.

It is started by bench.conductor with the interpreter of an environment that has ai-dynamo-runtime and nothing of ours.
"""

import json
import sys
from time import perf_counter

from dynamo._core import RadixTree


def main() -> None:
    question = json.load(sys.stdin)
    chains, holders = question["chains"], question["holders"]
    tree = RadixTree()
    events = [(worker, _stored(number, chains[chain][:depth])) for number, (worker, chain, depth) in enumerate(holders)]
    started_s = perf_counter()
    for worker, event in events:
        tree.apply_event(worker, event)
    insert_s = (perf_counter() - started_s) / len(events)
    matches = [{str(worker[0]): depth for worker, depth in tree.find_matches(c).scores.items()} for c in chains]
    rounds = []
    for _ in range(question["rounds"]):
        started_s = perf_counter()
        for chain in chains:
            tree.find_matches(chain)
        rounds.append((perf_counter() - started_s) / len(chains))
    json.dump({"insert_s": insert_s, "match_s": rounds, "matches": matches}, sys.stdout)


def _stored(number: int, hashes: list[int]) -> bytes:
    blocks = [{"block_hash": value, "tokens_hash": value} for value in hashes]
    return json.dumps({"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}).encode()


if __name__ == "__main__":
    main()
