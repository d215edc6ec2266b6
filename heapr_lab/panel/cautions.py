"""What a person may overlook in a selection or an evaluation, as sentences.

Each function gives a text, empty if there is nothing to say. They read counts only, so
that they keep up with a slider.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from heapr_lab.panel.looks import status
from heapr_lab.panel.session import NotKnownError, PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import BUDGETS, Selection
from heapr_lab.text.calibration_spec import Calibration, corpora_of

_TOLERANCE = 0.01
"""Share by which more or less may be removed than was asked for, unmentioned."""

_DIGITS = 9
"""Digits to which shares are compared, so that 0.61 is a hundredth above 0.6."""


def cautions(session: PruningSession) -> list[str]:
    """The cautions about the selection, which must be feasible."""
    try:
        keep, chosen = session.keep, session.selection
        removed = removed_share(chosen, keep, session.savings())
    except NotKnownError:
        return []
    texts = emptied_layers(keep), emptied_experts(keep), rounded(chosen, removed)
    return [text for text in texts if text]


def cautions_html(texts: Iterable[str]) -> str:
    """The texts as notes that a screen reader reads aloud when they change."""
    return "".join(status(f"⚠ {text}") for text in texts)


def emptied_layers(keep: KeepMask) -> str:
    """The layers that lose all their atoms."""
    gone = [str(layer) for layer, kept in keep.arrays.items() if not kept.any()]
    if not gone:
        return ""
    which = f"Layers {', '.join(gone)} lose" if gone[1:] else f"Layer {gone[0]} loses"
    return f"{which} all routed atoms: nothing is left there for a token to go to."


def emptied_experts(keep: KeepMask) -> str:
    """How many experts lose all their atoms."""
    kept = [np.count_nonzero(array, axis=1) for array in keep.arrays.values()]
    widths = np.concatenate(kept)
    gone = int(np.count_nonzero(widths == 0))
    if not gone:
        return ""
    verb = "loses" if gone == 1 else "lose"
    return f"{gone:,} of {len(widths):,} experts {verb} all atoms."


def removed_share(
    selection: Selection, keep: KeepMask, savings: pd.DataFrame | None
) -> float | None:
    """The share that `keep` removes of what the ratio counts.

    Args:
        selection: its budget says what is counted.
        keep: its mask.
        savings: the mask's, as `savings_of` gives them; None if they are unknown, and
            then only atoms can be counted.
    """
    if selection.of == "atoms":
        return keep.achieved_ratio
    if savings is None:
        return None
    return float(savings.iloc[0]["parameter_reduction"])


def rounded(selection: Selection, removed: float | None) -> str:
    """What was asked for and what is removed, if they differ by more than a point."""
    asked = float(selection.ratio)
    if removed is None or round(abs(removed - asked), _DIGITS) <= _TOLERANCE:
        return ""
    why = "; ".join(_why_rounded(selection))
    return (
        f"Asked for {asked:.1%} of the {BUDGETS[selection.of]}, {removed:.1%} are "
        f"removed{f': {why}' if why else ''}."
    )


def _why_rounded(selection: Selection) -> list[str]:
    """The settings that keep a ratio from being met exactly."""
    why = []
    if selection.structure != "ragged":
        widths = f"widths of the structure {selection.structure} are rounded down"
        many = f" to a multiple of {selection.step}" if selection.step > 1 else ""
        why.append(widths + many)
    if selection.granularity == "expert":
        why.append("experts are pruned whole")
    if selection.exclude_layers and not selection.in_one_group:
        why.append("with the scope layer no other layer makes up for those not pruned")
    return why


def judged_on_own(corpora: Iterable[str], calibration: Calibration) -> str:
    """Whether a model was only judged on the kind of text that it was calibrated on.

    Args:
        corpora: the corpora that its loss was measured on; tasks are not among them.
        calibration: what its atoms were measured on.
    """
    judged = set(corpora)
    if not judged or not judged <= {*corpora_of(calibration.corpus)}:
        return ""
    return (
        f"Perplexity was only measured on what was calibrated on, {calibration.corpus}"
        ": other text usually loses more. Evaluate another corpus as well."
    )
