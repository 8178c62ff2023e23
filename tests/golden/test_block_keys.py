"""Block keys are what they were, in every process. A change here breaks every stored cache: it needs a new RECIPE."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_mesh.kv.block_hash import RECIPE, chain, key_root, token_bytes

VECTORS = Path(__file__).with_name("block_keys.json")

NAMESPACES = {
    "plain": ("smollm2-135m@0", "float32", 16, 737280, "", ""),
    "bfloat16": ("smollm2-135m@0", "bfloat16", 16, 368640, "", ""),
    "tiny blocks": ("smollm2-135m@0", "float32", 1, 46080, "", ""),
    "tenant ab, salt c": ("m", "float32", 16, 1, "ab", "c"),
    "tenant a, salt bc": ("m", "float32", 16, 1, "a", "bc"),
    "tenant abc, no salt": ("m", "float32", 16, 1, "abc", ""),
    "numbers 1 and 23": ("m", "float32", 1, 23, "", ""),
    "numbers 12 and 3": ("m", "float32", 12, 3, "", ""),
    "not ASCII": ("модель/模型", "float32", 16, 1, "租户", "🧂"),
    "embedded zero": ("m\x00", "float32", 16, 1, "", "\x00"),
}
PROMPTS = {
    "counting": list(range(40)),
    "extremes": [0, 1, 49151, 151935, 262143, 2**31 - 1] * 6,
    "one token repeated": [7] * 33,
    "exactly one block": list(range(100, 116)),
    "less than a block": [5] * 15,
    "empty": [],
}


def compute() -> dict[str, object]:
    vectors = []
    for name, (fingerprint, dtype, block_tokens, block_bytes, tenant, cache_salt) in NAMESPACES.items():
        root = key_root(
            fingerprint=fingerprint,
            dtype=dtype,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        keys = {
            prompt: [key.hex() for key in chain(root, token_bytes(tokens), block_tokens)[:4]]
            for prompt, tokens in PROMPTS.items()
        }
        vectors.append({"namespace": name, "root": root.hex(), "keys": keys})
    return {"recipe": RECIPE, "vectors": vectors}


def test_keys_are_the_frozen_ones(update_golden: bool) -> None:
    if update_golden:
        VECTORS.write_text(json.dumps(compute(), indent=1) + "\n")
    assert compute() == json.loads(VECTORS.read_text())


def test_no_two_namespaces_share_a_key() -> None:
    vectors = json.loads(VECTORS.read_text())["vectors"]
    roots = [vector["root"] for vector in vectors]
    assert len(set(roots)) == len(roots) == len(NAMESPACES)
    keys = [key for vector in vectors for prompt in vector["keys"].values() for key in prompt]
    assert len(set(keys) | set(roots)) == len(set(keys)) + len(roots)


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_another_process_computes_the_same(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
    )
    assert json.loads(done.stdout) == json.loads(VECTORS.read_text())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compute()))
