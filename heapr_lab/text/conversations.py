"""Conversations as texts: through the chat template of a tokenizer.

Models that were trained to chat see their template at run time, so their scores should,
too. A conversation is a list of messages, each with a `role` and a `content`, as in the
`messages` column of data sets on the hub.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from heapr_lab.errors import CorpusError
from heapr_lab.text.corpora import Corpus


def rendered(corpus: Corpus, tokenizer: Any) -> str:
    """The whole corpus as one string, as `tokenizer` is given it.

    Texts are joined by blank lines; conversations go through the chat template, whose
    special tokens separate them.

    Raises:
        CorpusError: the tokenizer has no chat template, or the template refuses a
            conversation.
    """
    if not corpus.chat:
        return corpus.joined()
    _check_template(corpus, tokenizer)
    parts = []
    for number, text in enumerate(corpus.texts, start=1):
        with _named(corpus, number):
            part = tokenizer.apply_chat_template(json.loads(text), tokenize=False)
            parts.append(str(part))
    return "".join(parts)


def questions(
    corpus: Corpus, tokenizer: Any, *, limit: int | None = None
) -> list[tuple[list[Any], list[int]]]:
    """Each conversation up to its last user's turn, and the ids that ask for an answer.

    Conversations without a user's turn are left out; with a `limit` only so many of the
    first ones are rendered.

    Raises:
        CorpusError: as `rendered`, or no conversation has a user's turn.
    """
    _check_template(corpus, tokenizer)
    found = []
    for number, text in enumerate(corpus.texts, start=1):
        turns = json.loads(text)
        asked = [at for at, turn in enumerate(turns) if turn["role"] == "user"]
        if not asked:
            continue
        messages = turns[: asked[-1] + 1]
        with _named(corpus, number):
            prompt = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(str(prompt), add_special_tokens=False)["input_ids"]
        found.append((messages, list(ids)))
        if len(found) == limit:
            break
    if not found:
        raise CorpusError(
            f"no conversation of corpus {corpus.name!r} has a turn of role 'user' to "
            "be answered"
        )
    return found


@contextlib.contextmanager
def _named(corpus: Corpus, number: int) -> Iterator[None]:
    """Raise an error of the template as one that names the conversation.

    Raises:
        CorpusError: the template refuses the conversation.
    """
    try:
        yield
    except Exception as error:  # a template is a program of its own
        raise CorpusError(
            f"corpus {corpus.name!r}, conversation {number}: the chat template "
            f"refuses it ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _check_template(corpus: Corpus, tokenizer: Any) -> None:
    """Check that there is a chat template.

    Raises:
        CorpusError: there is none.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise CorpusError(
            f"corpus {corpus.name!r} has conversations, and the tokenizer has no chat "
            "template: give plain text (a 'text' column), or a chat model"
        )
