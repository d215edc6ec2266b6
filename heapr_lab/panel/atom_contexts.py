"""The contexts of an atom, or an expert, in the windows of a calibration, for tabs.

Importing this needs no torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from heapr_lab.panel.jobs import Report
from heapr_lab.panel.passage_html import contexts_html
from heapr_lab.text.calibration_spec import Calibration

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench


def find_contexts(
    bench: "Workbench",
    calibration: Calibration,
    place: Mapping[str, int],
    report: Report,
    *,
    said: str,
) -> tuple[pd.DataFrame, str]:
    """The tokens that activate an atom or an expert most, also as HTML.

    Args:
        bench: the workbench of the dense model.
        calibration: its windows are searched.
        place: layer, expert and atom; without an atom it is the whole expert.
        report: is told of each window.
        said: what else to say about it, after its place.

    Returns:
        The frame of `activations.top_contexts`, and the same for people.

    Raises:
        HeaprLabError: there is no such atom or expert, or no such corpus.
    """
    from heapr_lab.inspection.activations import top_contexts

    report(0, 1, "reading the corpus")
    windows = bench.calibration_set(calibration)
    contexts = top_contexts(
        bench.model,
        windows,
        tokenizer=bench.tokenizer,
        layer=place["layer"],
        expert=place["expert"],
        atom=place.get("atom"),
        progress=lambda done, total: report(done, total, f"window {done} of {total}"),
    )
    summary = (
        f"{place_text(place).capitalize()}: {said}. Searched: {windows.n_sequences} "
        f"windows of {windows.label}."
    )
    return contexts, contexts_html(contexts, summary=summary)


def place_text(place: Mapping[str, int]) -> str:
    """The place as text, for example `layer 0, expert 1, atom 2`."""
    return ", ".join(f"{name} {number}" for name, number in place.items())
