"""What a gateway's tokenizer takes for the next turn of a conversation: `python -m bench.tokenizing`.

Each prompt is what was asked before and 64 tokens more. It is encoded as a whole, and by what the turn before has told;
one after the other, with the same result.
"""

import argparse
from statistics import median
from time import perf_counter
from typing import Final

from bench.report import Report
from bench.serving_client import Prompts
from mooncake_mesh.engine.model_files import resolve_model
from mooncake_mesh.gateway.model_tokenizer import ModelTokenizer
from mooncake_mesh.gateway.tokenizer import SpecialTokens

_NEXT_TURN_TOKENS: Final = 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tokenizing", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="smollm2-135m")
    Report.add_flags(parser)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    tokenizer, prompts = ModelTokenizer(folder), Prompts(folder / "tokenizer.json", seed=1)
    report = Report("tokenizing", f"{args.model}: tokens of a conversation's next turn")
    for n_tokens in (512, 2048, 8192, 32_768):
        pairs = [_one(tokenizer, prompts, n_tokens) for _ in range(args.rounds)]
        ratios = [known_s / whole_s for known_s, whole_s in pairs]
        report.row(
            f"{n_tokens} tokens and {_NEXT_TURN_TOKENS} more",
            1e3 * median(known_s for known_s, _ in pairs),
            "ms",
            baseline=1e3 * median(whole_s for _, whole_s in pairs),
            ratio=median(ratios),
            n=len(pairs),
            spread=(min(ratios), max(ratios)),
        )
    report.note("baseline: the whole prompt is encoded")
    report.finish(args)


def _one(tokenizer: ModelTokenizer, prompts: Prompts, n_tokens: int) -> tuple[float, float]:
    """Seconds by what is known, and as a whole."""
    text = prompts.text(n_tokens)
    tokenizer.encode(text, SpecialTokens.ADD, "one client")
    text += prompts.text(_NEXT_TURN_TOKENS)
    began_s = perf_counter()
    known = tokenizer.encode(text, SpecialTokens.ADD, "one client")
    between_s = perf_counter()
    whole = tokenizer.encode(text, SpecialTokens.ADD)
    ended_s = perf_counter()
    if known != whole:
        raise SystemExit("the tokens differ")
    return between_s - began_s, ended_s - between_s


if __name__ == "__main__":
    main()
