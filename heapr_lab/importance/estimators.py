"""Importance estimators: short expressions of a table's columns.

Without torch. Notation: e = w_down · h is an atom's part of its expert's output, h its
activation, ∂ℓ/∂h the gradient of the summed loss, p the routing weight, T the tokens
routed to the expert (column `tokens`), N the predicted tokens (metadata); Σ and mean
are over the T routed tokens. Scores are float64 arrays, one value per row; a larger one
means a more important atom; none is negative. Equations are numbered as in the paper
(HEAPr, ICLR 2026); `heapr_lab.importance` derives that `heapr` is its Algorithm 1.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from heapr_lab.errors import SpecError, check_names, number_to, one_of, whole_number
from heapr_lab.importance.columns import KEYS

_Scores = npt.NDArray[np.float64]

PER_TOKEN = "nats per token"
"""Unit of losses, and of scores that are divided by all predicted tokens."""
PER_ROUTED_TOKEN = "nats per routed token"
"""Unit of scores that are means over the tokens routed to an expert."""
_NO_UNIT = "arbitrary unit"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a formula: the columns in float64, N and the options."""

    frame: pd.DataFrame
    N: float
    options: Mapping[str, Any]

    def __getitem__(self, name: str) -> _Scores:
        values: _Scores = self.frame[name].to_numpy(dtype=np.float64)
        return values

    @property
    def routed(self) -> _Scores:
        """T: tokens routed to the atom's expert, at least 1."""
        return np.maximum(self["tokens"], 1)


_Option = tuple[float, Callable[..., float]]
"""The default of a number from 0 that changes a formula, and what checks a value."""


@dataclass(frozen=True)
class Estimator:
    """One way to score atoms."""

    name: str
    description: str
    """One line for lists and menus; the formula's docstring has the mathematics."""
    formula: Callable[[Inputs], _Scores] = field(repr=False)
    unit: str = _NO_UNIT
    """Unit of its scores, as in figures; that of a loss is in nats."""
    needs: tuple[str, ...] = ()
    """Columns it reads."""
    needs_of_gated: tuple[str, ...] = ()
    """Columns it also reads if the experts have gates."""
    options: Mapping[str, _Option] = field(default_factory=dict)
    """Its options by name."""
    within_layer: bool = False
    """Whether only scores of the same layer can be compared."""
    extra_pass: bool = False
    """Whether a column it needs takes another forward pass (`eliminate`); the columns
    of all others are in every measured table."""

    @property
    def per_predicted_token(self) -> bool:
        """Whether it divides by the number of predicted tokens."""
        return self.unit == PER_TOKEN

    @property
    def second_order(self) -> bool:
        """Whether it estimates the loss increase, which is 0 for an unrouted expert."""
        return self.unit in {PER_TOKEN, PER_ROUTED_TOKEN}


def _heapr(x: Inputs) -> _Scores:
    """½ · Σh²/T · Σ(∂ℓ/∂h)²/T = mean ½ eᵀ Ḡ e.

    The increase of the loss per routed token if the atom's output became 0.

    Source: HEAPr, Algorithm 1, equations 15 and 16.
    """
    return 0.5 * (x["sum_h2"] / x.routed) * (x["sum_g2"] / x.routed)


def _heapr_total(x: Inputs) -> _Scores:
    """½ · Σh² · Σ(∂ℓ/∂h)² / T / N, which is T/N times `heapr`.

    The increase of the mean loss over all tokens, so rarely used experts count less.

    Source: this project; equation 13 of HEAPr with the mean over all tokens.
    """
    return 0.5 * x["sum_h2"] * x["sum_g2"] / x.routed / x.N


def _fisher(x: Inputs) -> _Scores:
    """½ · Σ(h · ∂ℓ/∂h)² / N.

    It is large if h and ∂ℓ/∂h are large at the same tokens.

    Source: HEAPr, appendix A, equation 25, with each token's own G(x).
    """
    return 0.5 * x["sum_hg2"] / x.N


def _elimination(x: Inputs) -> _Scores:
    """‖w_k‖² / [(C + λ S²)⁻¹]_kk times a price, with C = Σ (p·h) (p·h)ᵀ over atoms.

    S² is the diagonal of C. Atoms are removed one by one; this is the squared error of
    the output when it is the turn of atom k, and W_down of the atoms that are left is
    refitted. The price turns it into loss: the expert's `fisher` scores divided by the
    energy of its output. `eliminate` writes the column.

    Source: Optimal Brain Surgeon (Hassibi & Stork 1993; HEAPr, equation 2) of W_down.
    """
    return x["elimination"]


def _camera(x: Inputs) -> _Scores:
    """‖w_down‖² · ((1 − α) · Σ(p·h)² + α · max (p·h)²).

    Energy and peak of the atom's output, without a gradient. Squared as in the authors'
    code; HEAPr, section 4.2, prints (‖Φ‖₂ + α‖Φ‖_∞) · ‖w_down‖.

    Source: CAMERA-P (Xu et al. 2025).
    """
    alpha: float = x.options["alpha"]
    largest = x["max_abs_ph"]
    return x["w_down_sq"] * ((1 - alpha) * x["sum_ph2"] + alpha * largest * largest)


def _magnitude(x: Inputs) -> _Scores:
    """‖w_down‖² + ‖w_up‖² + ‖w_gate‖², without the last if there is no gate.

    Source: a control: magnitude pruning (Han et al. 2015) of whole atoms.
    """
    squares = x["w_down_sq"] + x["w_up_sq"]
    return squares + x["w_gate_sq"] if "w_gate_sq" in x.frame else squares


def _frequency(x: Inputs) -> _Scores:
    """T, the same for all atoms of an expert.

    Source: a control: the use of the expert alone.
    """
    return x["tokens"]


def _random(x: Inputs) -> _Scores:
    """Uniform in [0, 1), drawn row by row from `seed`.

    Source: a control: chance.
    """
    generator = np.random.Generator(np.random.PCG64(x.options["seed"]))
    scores: _Scores = generator.random(len(x.frame))
    return scores


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        estimator.name: estimator
        for estimator in (
            Estimator(
                "heapr",
                "the paper's score: ½ · mean h² · mean (∂ℓ/∂h)² over routed tokens",
                _heapr,
                unit=PER_ROUTED_TOKEN,
                needs=("tokens", "sum_h2", "sum_g2"),
            ),
            Estimator(
                "heapr_total",
                "the same weighted by use: estimated change of the corpus loss",
                _heapr_total,
                unit=PER_TOKEN,
                needs=("tokens", "sum_h2", "sum_g2"),
            ),
            Estimator(
                "fisher",
                "½ · mean (h · ∂ℓ/∂h)²: the product squared, per predicted token",
                _fisher,
                unit=PER_TOKEN,
                needs=("sum_hg2",),
            ),
            Estimator(
                "elimination",
                "loss increase if the kept atoms compensate for the atom when its turn "
                "comes; from `eliminate`, which adds a forward pass",
                _elimination,
                unit=PER_TOKEN,
                needs=("elimination",),
                extra_pass=True,
            ),
            Estimator(
                "camera",
                "CAMERA-P: energy and peak of p · h times ‖w_down‖², within a layer",
                _camera,
                needs=("w_down_sq", "sum_ph2", "max_abs_ph"),
                options={"alpha": (0.9, functools.partial(number_to, 1))},
                within_layer=True,
            ),
            Estimator(
                "magnitude",
                "control: squared norm of the atom's weights, no data",
                _magnitude,
                needs=("w_down_sq", "w_up_sq"),
                needs_of_gated=("w_gate_sq",),
            ),
            Estimator(
                "frequency",
                "control: tokens routed to the atom's expert",
                _frequency,
                unit="tokens",
                needs=("tokens",),
            ),
            Estimator(
                "random",
                "control: uniform numbers from a seed",
                _random,
                options={"seed": (0, functools.partial(whole_number, least=0))},
            ),
        )
    }
)
"""Every estimator by name."""


def find_estimator(name: str) -> Estimator:
    """The estimator with that name.

    Raises:
        SpecError: there is none.
    """
    return ESTIMATORS[one_of(name, ESTIMATORS, name="estimator")]


def unit_of(name: str) -> str:
    """The unit of the scores of estimator `name`; arbitrary if it is unknown."""
    return ESTIMATORS[name].unit if name in ESTIMATORS else _NO_UNIT


def complete_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, completed with the defaults of estimator `name`.

    Raises:
        SpecError: the estimator has no such option, or the value is invalid.
    """
    known = find_estimator(name).options
    check_names(options, known, of=f"estimator {name!r}", noun="option")
    return {
        key: check(options.get(key, default), name=key)
        for key, (default, check) in known.items()
    }


def score(
    frame: pd.DataFrame,
    metadata: Mapping[str, Any],
    *,
    estimator: str = "heapr",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> _Scores:
    """One score per row of `frame`, float64 and finite.

    Atoms of experts without routed tokens score 0 in the second-order estimators.

    Args:
        frame: rows (layer, expert, atom) with the columns the estimator needs, all of
            which are finite, as in any `ImportanceTable`.
        metadata: metadata of the table: `N`, and `architecture` if it is known.
        estimator: a name in `ESTIMATORS`.
        options: options of the estimator (`alpha` of camera, `seed` of random).

    Raises:
        SpecError: a column or N is missing, or a score is not finite.

    Example:
        Two tokens with h = 1, 3 and ∂ℓ/∂h = 2, 0: ½ · 10/2 · 4/2 = 5.

        >>> row = pd.DataFrame({"tokens": [2], "sum_h2": [10.0], "sum_g2": [4.0]})
        >>> float(score(row, {})[0])
        5.0
    """
    chosen = find_estimator(estimator)
    needed = _needed(chosen, frame, metadata)
    missing = [name for name in needed if name not in frame]
    if missing:
        raise SpecError(
            f"estimator {estimator!r} needs column {', '.join(missing)}; the table has "
            f"{', '.join(map(str, frame.columns))}; read or collect it with that column"
        )
    N = _predicted_tokens(chosen, metadata)
    inputs = Inputs(frame, N, complete_options(estimator, options))
    with np.errstate(invalid="ignore", over="ignore"):
        values = chosen.formula(inputs)
    if chosen.second_order and "tokens" in frame:
        values = np.where(frame["tokens"].to_numpy() > 0, values, 0.0)
    _check_finite(frame, values, estimator=estimator)
    return values


def _needed(
    chosen: Estimator, frame: pd.DataFrame, metadata: Mapping[str, Any]
) -> tuple[str, ...]:
    """The columns to read, for a model with gates or without."""
    # A table read without w_gate_sq must not silently score as if it had no gates.
    layers = (metadata.get("architecture") or {}).get("layers", {})
    has_gates = any(shape.get("n_matrices") == 3 for shape in layers.values())
    gated = has_gates or "w_gate_sq" in frame
    return (*chosen.needs, *chosen.needs_of_gated) if gated else chosen.needs


def _predicted_tokens(chosen: Estimator, metadata: Mapping[str, Any]) -> float:
    if not chosen.per_predicted_token:
        return 1.0
    N = metadata.get("N")
    if not N or N < 0:
        raise SpecError(
            f"estimator {chosen.name!r} needs N, the number of predicted tokens, in "
            f"the metadata, got {N!r}; give ImportanceTable.from_frame(frame, N=...)"
        )
    return float(N)


def _check_finite(frame: pd.DataFrame, values: _Scores, *, estimator: str) -> None:
    """Check that every score is finite, as the columns of a table are.

    Raises:
        SpecError: one is not (the first row is named).
    """
    rows = np.flatnonzero(~np.isfinite(values))
    if len(rows):
        atom = tuple(int(frame[key].iloc[rows[0]]) for key in KEYS)
        raise SpecError(
            f"{len(rows)} {estimator!r} scores are not finite, as columns are not "
            f"or are too large, first at (layer, expert, atom) {atom}; collect again, "
            "with dtype float32 if the model overflows in a smaller one"
        )
