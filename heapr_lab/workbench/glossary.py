"""The glossary: what each control and term of the panel means, in a sentence or two.

Tooltips and the help of the panel, and the page `docs/glossary.md`, are made of it.
Without torch. Estimators say themselves what they are.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from heapr_lab.importance.estimators import ESTIMATORS, Estimator
from heapr_lab.pruning.options import BUDGETS

_UNIT = re.compile(r"\s*\[[^]]*\]$")
_PAPER = "HEAPr, Algorithm 1"


@dataclass(frozen=True)
class Term:
    """A word, and what it means."""

    name: str
    text: str
    """Plain English, whole sentences."""
    page: str = ""
    """The page of `docs` that says more; empty if there is none."""
    paper: str = ""
    """Where the paper has it."""
    labels: tuple[str, ...] = ()
    """What else stands on controls and in lists that it explains."""


def _estimator(found: Estimator) -> Term:
    first, rest = found.description[0], found.description[1:]
    limits = " Scores are compared within a layer only." * found.within_layer
    text = f"An estimator. {first.upper()}{rest}; in {found.unit}.{limits}"
    paper = f"{_PAPER}, equations 15 and 16" if found.name == "heapr" else ""
    return Term(found.name, text, "method.md", paper)


_MODEL = (
    Term(
        "atomic expert",
        "Row k of an expert's W_gate and W_up with column k of its W_down: the "
        "smallest part of an expert that can be removed alone. As a granularity, atoms "
        "are pruned one by one.",
        "method.md",
        labels=("atom",),
    ),
    Term(
        "expert",
        "One of the feed-forward networks of a layer, of which the router sends each "
        "token to a few. As a granularity, experts are pruned whole, by the sum of "
        "their atoms' scores.",
        "method.md",
    ),
    Term(
        "layer",
        "A layer of the model that has routed experts, by its index. As a scope, each "
        "layer loses the same share, by its own ranking (HEAPr-L).",
        "method.md",
    ),
    Term(
        "router",
        "The part of a layer that chooses the experts of each token, and weights what "
        "they return by p.",
    ),
    Term(
        "traffic",
        "How many tokens the router sends to an expert, relative to an even share "
        "among the experts of its layer.",
    ),
    Term(
        "mask",
        "Which atoms are kept. Under a mask the model computes as if the others were "
        "not there; no file changes.",
    ),
    Term(
        "dense",
        "The model as it was loaded, with nothing pruned: what each Δloss is the "
        "difference to.",
    ),
)
_CHOICE = (
    Term(
        "ratio",
        "The share to remove, below 1, as a fraction such as 0.40 or in per cent with "
        "the sign, 40%; the budget says of what.",
        "method.md",
    ),
    Term(
        "budget",
        "What the ratio counts; a word in brackets is the value of --of on the command "
        "line.",
        "method.md",
    ),
    Term(BUDGETS["atoms"], "The ratio is a share of all routed atomic experts."),
    Term(
        BUDGETS["model"],
        "The ratio is a share of the parameters of the whole model, attention and "
        "embeddings included.",
    ),
    Term(BUDGETS["bytes"], "The ratio is a share of the bytes of the whole model."),
    Term(
        BUDGETS["flops"],
        "The ratio is a share of the operations of the routed experts, so that an atom "
        "counts as often as tokens are routed to its expert.",
    ),
    Term(
        "target Δloss",
        "The ratio is the largest whose predicted Δloss is at most the number beside "
        "it, on the first corpus that is selected in Evaluate.",
        "method.md",
    ),
    Term(
        "Δloss ≤",
        "The largest predicted Δloss that a target allows, in nats per token; used "
        "only where the budget is target Δloss.",
    ),
    Term(
        "estimator",
        "The formula that scores each atom; those with the lowest scores are pruned. "
        "Offered are those whose sums the table has.",
        "method.md",
    ),
    Term(
        "scope",
        "Which atoms are ranked together: those of all layers, or those of each.",
        "method.md",
    ),
    Term(
        "global",
        "As a scope: the atoms of all layers are ranked together, so that layers lose "
        "different shares (HEAPr-G).",
        "method.md",
    ),
    Term("granularity", "What is pruned as one: single atoms, or whole experts."),
    Term(
        "structure",
        "Which widths experts may have afterwards; a width is the number of atoms that "
        "an expert keeps.",
        "checkpoints.md",
    ),
    Term(
        "ragged",
        "As a structure: each expert has a width of its own, so that the lowest scores "
        "go, wherever they are.",
        "checkpoints.md",
    ),
    Term(
        "aligned",
        "As a structure: each expert has a width of its own that is a multiple of a "
        "number, or 0, or whole.",
        "checkpoints.md",
    ),
    Term(
        "per_layer",
        "As a structure: all experts of a layer have the same width.",
        "checkpoints.md",
    ),
    Term(
        "uniform",
        "As a structure: all experts of the model have the same width, as ordinary "
        "checkpoints and engines need. It is rounded, so more may go than the ratio.",
        "checkpoints.md",
    ),
    Term(
        "multiple",
        "The number that widths are a multiple of; every structure but ragged has one.",
        "checkpoints.md",
    ),
    Term(
        "min atoms per expert",
        "The fewest atoms that each expert keeps; at 0 an expert can lose all.",
    ),
    Term(
        "layers not pruned",
        "Layers that stay whole, as numbers and ranges such as 0, 5-7. With the scope "
        "global the others lose more, so that the ratio is met.",
    ),
)
_SCORES = (
    Term(
        "score",
        "The estimated importance of an atom: for most estimators, by how much the "
        "loss rises if it is removed. Also called importance.",
        "method.md",
        _PAPER,
    ),
    Term(
        "importance table",
        "For each atom, a few sums over the calibration text, of which every estimator "
        "is a short expression; measured once and cached.",
        "method.md",
    ),
)
_WEIGHTS = (
    Term(
        "weights",
        "How the weights that stay are made, for what is evaluated and exported.",
        "method.md",
    ),
    Term(
        "unchanged",
        "As weights: those that stay are as they were, as HEAPr publishes it; also "
        "called masked.",
        "method.md",
    ),
    Term(
        "compensated",
        "As weights: W_down of the kept atoms is fitted anew, so that each expert "
        "returns what it returned before as nearly as it can.",
        "method.md",
    ),
    Term(
        "compress",
        "As weights: the best of several estimators and ways to fit the weights, "
        "judged by the loss on calibration windows that were held out.",
        "method.md",
    ),
    Term(
        "own text",
        "Windows that the model writes itself, in per cent of those of the corpus and "
        "in addition to them, so that what the corpus does not show is not pruned "
        "away.",
        "method.md",
    ),
    Term(
        "bias",
        "An output bias for each expert: the mean of what was removed is added back. "
        "It takes one forward pass and a structure other than uniform.",
        "method.md",
        labels=("an output bias for each expert (not uniform)",),
    ),
    Term(
        "distil",
        "Steps of training, after pruning, in which each layer's experts learn to "
        "return what the dense ones return; 0 trains nothing.",
        "method.md",
    ),
)
_TEXT = (
    Term(
        "calibration",
        "The text that importance is measured on: windows drawn from a corpus with a "
        "seed.",
        "models.md",
    ),
    Term(
        "window",
        "A piece of text of a fixed number of tokens, which is read alone.",
        "models.md",
    ),
    Term(
        "context length",
        "The tokens of a window; operations of attention are counted at it.",
    ),
    Term(
        "corpora",
        "Texts by name or file; perplexity is measured on the windows of their test "
        "splits, which are not calibrated on. Several can be chosen.",
        "models.md",
        labels=("corpus",),
    ),
    Term(
        "tasks",
        "Questions of lm-evaluation-harness, or continuation, which needs no network; "
        "each gives an accuracy with its standard error. Several can be chosen.",
        "models.md",
    ),
    Term(
        "Δloss",
        "The loss of the pruned model minus that of the dense one on the same text, in "
        "nats per token; perplexity is multiplied by e to this power.",
    ),
    Term(
        "ratios",
        "Ratios at which Sweep evaluates, with commas between them, such as 10%, 20%, "
        "40%; all other settings are those above.",
    ),
    Term(
        "estimators",
        "By which Sweep ranks atoms, one after the other; compress chooses itself. "
        "Several can be chosen.",
    ),
    Term(
        "perplexity",
        "e to the mean loss of the next token: as unsure as a choice between so many "
        "equally likely tokens.",
    ),
    Term(
        "measured",
        "Said of a number: the model was run with exactly these settings.",
    ),
    Term(
        "predicted",
        "Said of a number: read from a curve through measurements of the same settings "
        "at other ratios; nothing was run.",
        "method.md",
    ),
)
_INSPECT = (
    Term(
        "map of",
        "What the map of experts shows, one number for each. A click or Enter on a "
        "cell chooses its expert; arrow keys move.",
        "panel.md",
    ),
    Term(
        "kept share",
        "The share of an expert's atoms that the selection keeps.",
    ),
    Term(
        "score mass",
        "The sum of the scores of an expert's atoms, by the estimator above.",
    ),
    Term(
        "difference to a pin",
        "The kept share of an expert minus that of a pin, which is a selection saved "
        "in Compare: below 0 where less is kept now.",
    ),
    Term("pin of the map", "The pin whose kept share is subtracted."),
    Term(
        "order of experts",
        "How the map and its table order the experts of each layer.",
    ),
    Term("as numbered", "As an order: a column is an expert, by its index."),
    Term(
        "by value",
        "As an order: each layer by what the map shows, the largest first, so that a "
        "column is a rank.",
    ),
    Term(
        "by traffic",
        "As an order: each layer by traffic, the busiest expert first, whatever the "
        "map shows.",
    ),
    Term(
        "layer of the expert",
        "The layer of the chosen expert; a click on the map sets it.",
    ),
    Term(
        "number of the expert",
        "The chosen expert, by its index in its layer; a click on the map sets it.",
    ),
    Term("text", "The text to inspect, which is read from its beginning."),
    Term(
        "tokens to write",
        "How many tokens the dense and the pruned model each add to the text.",
    ),
    Term(
        "layer of the token",
        "The layer whose router and experts are shown for the token.",
    ),
    Term(
        "position of the token",
        "Which token of the text, counted from 0; its first token has no loss.",
    ),
    Term("layer of the atom", "The layer of the atom whose inputs are shown."),
    Term(
        "pruned last",
        "The removed atoms with the highest scores; one that is chosen goes into the "
        "three boxes below.",
    ),
    Term(
        "restore and prune alone",
        "Of which parts the loss is measured, with only this part put back and with "
        "only this part pruned.",
        labels=("layers", "experts"),
    ),
    Term(
        "first order",
        "The gradient of the loss times what was removed: a cheap estimate of each "
        "part's share, labelled as such; Measure runs the model instead.",
    ),
)
_FILES = (
    Term(
        "label",
        "The name of a pin, which is a selection saved for comparison; a pin of the "
        "same name is replaced.",
        labels=("pin",),
    ),
    Term(
        "mask A",
        "One of the two masks that are compared: that of the current selection, of a "
        "pin, or of the current selection calibrated on another corpus.",
        labels=("mask B",),
    ),
    Term(
        "atom that only one removes",
        "The atoms of the last comparison of masks, in the order of its table.",
    ),
    Term(
        "Δloss against",
        "What is saved along the chart; the grey line joins what no other pin or "
        "method beats, the Pareto front.",
    ),
    Term(
        "methods",
        "Ways to make the model smaller, of this package and of other papers, fitted "
        "to the same windows. Several can be chosen.",
        "comparing.md",
    ),
    Term(
        "remove",
        "The ratios at which methods run, with commas between them: shares of the "
        "routed experts' parameters, such as 25% or 0.2, 0.4.",
        "comparing.md",
    ),
    Term(
        "folder",
        "Where files are written, relative to the notebook's folder; a model needs a "
        "new one.",
        "checkpoints.md",
    ),
    Term(
        "session file",
        "Where the state of the panel is saved, and read from, relative to the "
        "notebook's folder.",
        "panel.md",
    ),
    Term(
        "search",
        "Shows the terms of the help that have all of these words.",
    ),
)
GLOSSARY: Mapping[str, tuple[Term, ...]] = MappingProxyType(
    {
        "The model": _MODEL,
        "What is pruned": _CHOICE,
        "Scores": (*_SCORES, *map(_estimator, ESTIMATORS.values())),
        "Weights": _WEIGHTS,
        "Text and numbers": _TEXT,
        "Inspect": _INSPECT,
        "Compare, and files": _FILES,
    }
)
"""The terms by the heading they stand under."""
TERMS: Mapping[str, Term] = MappingProxyType(
    {
        name: term
        for terms in GLOSSARY.values()
        for term in terms
        for name in (term.name, *term.labels)
    }
)
"""The terms by their names and by the labels they explain."""


def find_term(label: str) -> Term | None:
    """The term that explains what stands on a control; None if there is none.

    Example:
        >>> find_term("own text [%]").name
        'own text'
    """
    return TERMS.get(_UNIT.sub("", label))


def search_terms(words: str) -> Iterator[tuple[str, Term]]:
    """Heading and term of each that has all `words`, in any case, in name or text.

    Example:
        >>> [term.name for _, term in search_terms("WIDTH all layer")]
        ['per_layer']
    """
    asked = words.casefold().split()
    for heading, terms in GLOSSARY.items():
        for term in terms:
            whole = " ".join((term.name, *term.labels, term.text)).casefold()
            if all(word in whole for word in asked):
                yield heading, term


def glossary_page() -> str:
    """The terms as Markdown, a section for each heading, as in `docs/glossary.md`."""
    sections = []
    for heading, terms in GLOSSARY.items():
        lines = "\n".join(f"* **{term.name}**: {_said(term)}" for term in terms)
        sections.append(f"## {heading}\n\n{lines}\n")
    return "\n".join(sections)


def _said(term: Term) -> str:
    """The text of a term, with where it is said at length."""
    links = [f"[{term.page.removesuffix('.md')}]({term.page})"] if term.page else []
    places = ", ".join([*links, *filter(None, [term.paper])])
    return f"{term.text} ({places})" if places else term.text
