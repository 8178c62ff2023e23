"""What transformers itself generates, in this process: the truth that the mesh is held against, and prompts for it."""

import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LEAST_MARGIN: Final = 1e-3
"""Float32 rounding moves logits by about 1e-5 between two orders of summation. Where the best two tokens of some step
lie closer than this, equality would be luck: the prompt is refused, not the mesh."""

_ADJECTIVES: Final = ("old", "quiet", "green", "distant", "narrow", "golden", "broken", "patient", "early", "heavy")
_NOUNS: Final = ("harbour", "engine", "garden", "letter", "river", "teacher", "signal", "window", "market", "storm")
_VERBS: Final = ("watched", "carried", "followed", "remembered", "repaired", "crossed", "painted", "measured")
_PLACES: Final = ("at noon", "near the coast", "in the rain", "behind the mill", "before winter", "without a word")
_ANSWER: Final = "<|im_end|>\n<|im_start|>assistant\n"
_QUESTIONS: Final = (
    f"\n\nWrite a short poem about the moon and the sea.{_ANSWER}",
    f"\n\nExplain in a few sentences how a lighthouse works.{_ANSWER}",
    f"\n\nWhat should a traveller pack for a week in the mountains?{_ANSWER}",
    f"\n\nTell me a story that begins in a railway station.{_ANSWER}",
)


class GreedyReference:
    """The model in *folder*, float32. ``picks`` takes one pass over an answer that exists, ``generate`` one a token.

    The same question is worked out once.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None  # as with ignore_eos
        self._picked: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        self._generated: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def prompt(self, n_tokens: int, *, seed: int) -> list[int]:
        """A text of exactly *n_tokens* tokens, with a question behind it where there is room.

        Equal for equal arguments on every machine; prompts with other arguments share no prefix worth caching.
        """
        opening, question = self._encode("<|im_start|>user\n"), self._encode(_QUESTIONS[seed % len(_QUESTIONS)])
        room = n_tokens - len(opening) - len(question)
        return [*opening, *self._story(room, seed), *question] if room > 0 else self._story(n_tokens, seed)

    def _story(self, n_tokens: int, seed: int) -> list[int]:
        numbers = random.Random(1_000_000 * seed + n_tokens)

        def pick(words: Sequence[str]) -> str:
            return words[
                int(numbers.random() * len(words))
            ]  # random() is stable between Python versions, choice is not

        tokens: list[int] = []
        text = ""
        while len(tokens) < n_tokens:
            for _ in range(16):
                text += f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} the {pick(_NOUNS)} {pick(_PLACES)}. "
            tokens = self._encode(text)
        return tokens[:n_tokens]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def picks(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The most likely token after *prompt*, and after it with each beginning of *answer*; as many as *answer* has.

        They equal *answer* exactly when it is the greedy one: each token is then the best after those before it. Fails
        where two candidates are nearly equal, up to the first token that differs.
        """
        key = (tuple(prompt), tuple(answer))
        if key not in self._picked:
            self._picked[key] = self._pick(prompt, answer)
        return self._picked[key]

    def _pick(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits = self._model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
        best = logits.topk(2)
        picked: list[int] = best.indices[:, 0].tolist()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(picked, answer, strict=True)))
        _check_margin(best.values[: same + 1], prompt)
        return picked

    def generate(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """The *n_tokens* tokens that ``generate`` puts after *prompt*. Fails where two candidates are nearly equal."""
        key = (tuple(prompt), n_tokens)
        if key not in self._generated:
            self._generated[key] = self._generate(prompt, n_tokens)
        return self._generated[key]

    def _generate(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        _check_margin(torch.stack(output.logits)[:, 0].topk(2).values, prompt)
        tokens: list[int] = output.sequences[0, len(prompt) :].tolist()
        return tokens


def _check_margin(best: torch.Tensor, prompt: Sequence[int]) -> None:
    """*best* holds the two highest logits of each step."""
    margin = float((best[:, 0] - best[:, 1]).min())
    assert margin > LEAST_MARGIN, f"near tie ({margin:.2g}) after {len(prompt)} tokens: take another seed"
