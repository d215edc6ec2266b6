"""Four-way continuation items made of any text: which continuation is the right one?

A passage is a run of whole texts with enough words; an item takes 48 consecutive words
of it as context and the next 12 as the right choice. The three wrong ones are the right
ones of other passages. White space is kept, except that every choice begins with that
of the right one, so that it does not give the answer away.
"""

import random
import re
from collections.abc import Iterator

import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.text.corpora import Corpus

N_CONTEXT_WORDS = 48
N_CHOICE_WORDS = 12
N_CHOICES = 4

_WORD = re.compile(r"\S+")


def continuation_items(corpus: Corpus, *, n_items: int) -> pd.DataFrame:
    """Items with columns context, choices (a list of four) and gold (its index).

    The same corpus and number give the same items everywhere.

    Args:
        corpus: held-out text, usually a test split.
        n_items: number of items, each from another passage.

    Raises:
        SpecError: `n_items` is below four, or the corpus has fewer passages, or
            conversations.
    """
    if corpus.chat:
        raise SpecError(
            f"corpus {corpus.name!r} has conversations, expected plain text"
        )
    passages = list(_passages(corpus.texts))
    if n_items < N_CHOICES or n_items > len(passages):
        raise SpecError(
            f"n_items is {n_items}, expected {N_CHOICES} to {len(passages)}: corpus "
            f"{corpus.name!r} ({corpus.split}) has {len(passages)} passages of at "
            f"least {N_CONTEXT_WORDS + N_CHOICE_WORDS} words"
        )
    rng = random.Random(0)
    chosen = rng.sample(passages, n_items)
    pairs = [_context_and_continuation(passage, rng) for passage in chosen]
    return pd.DataFrame([_item(pairs, index, rng) for index in range(n_items)])


def _passages(texts: tuple[str, ...]) -> Iterator[str]:
    """Shortest runs of consecutive texts, joined by a blank line, with enough words."""
    run: list[str] = []
    n_words = 0
    for text in texts:
        run.append(text)
        n_words += len(_WORD.findall(text))
        if n_words >= N_CONTEXT_WORDS + N_CHOICE_WORDS:
            yield "\n\n".join(run)
            run, n_words = [], 0


def _context_and_continuation(passage: str, rng: random.Random) -> tuple[str, str]:
    words = list(_WORD.finditer(passage))
    first = rng.randrange(len(words) - N_CONTEXT_WORDS - N_CHOICE_WORDS + 1)
    middle = words[first + N_CONTEXT_WORDS - 1].end()
    last = words[first + N_CONTEXT_WORDS + N_CHOICE_WORDS - 1].end()
    return passage[words[first].start() : middle], passage[middle:last]


def _item(
    pairs: list[tuple[str, str]], index: int, rng: random.Random
) -> dict[str, str | list[str] | int]:
    context, right = pairs[index]
    break_ = right[: len(right) - len(right.lstrip())]
    choices = [right]
    for other in rng.sample(range(len(pairs)), len(pairs)):
        wrong = break_ + pairs[other][1].lstrip()
        if wrong not in choices:  # texts repeat: a heading, a licence
            choices.append(wrong)
        if len(choices) == N_CHOICES:
            break
    rng.shuffle(choices)
    return {"context": context, "choices": choices, "gold": choices.index(right)}
