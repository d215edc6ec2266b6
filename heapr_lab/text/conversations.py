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
