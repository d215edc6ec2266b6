"""Importance estimators: short expressions of a table's columns.

Layer 1, without torch. Notation: T_i tokens routed to expert i (column `tokens`), N
predicted tokens (metadata), h activation of an atom, g = dl/dh its gradient with l
the summed loss, p routing weight. Scores are float64 arrays, one per row; except for
`taylor` larger always means more important and none is negative.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from heapr_lab.errors import SpecError

_SHOWN = 3  # rows named in a message about values that are not finite


_Scores = npt.NDArray[np.float64]

PER_TOKEN = "nats per token"
"""Unit of losses, and of scores that are divided by all predicted tokens."""
PER_ROUTED_TOKEN = "nats per routed token"
"""Unit of scores that are means over the tokens routed to an expert."""
_NO_UNIT = "arbitrary unit"


@dataclass(frozen=True)
class Inputs:
    """What a formula may use: the columns in float64, N and the options."""

    frame: pd.DataFrame
    N: float
    options: Mapping[str, Any]
    gated: bool

    def __getitem__(self, name: str) -> _Scores:
        values: _Scores = self.frame[name].to_numpy(dtype=np.float64)
        return values


@dataclass(frozen=True)
class Estimator:
    """One way to score atoms."""

    name: str
    description: str
    formula: Callable[[Inputs], _Scores] = field(repr=False)
    unit: str = _NO_UNIT
    """Of its scores, as figures write it; those of a loss are nats."""
    needs: tuple[str, ...] = ()
    """Columns it reads."""
    per_predicted_token: bool = False
    """Whether it divides by the number of predicted tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its options with their defaults."""
    within_layer: bool = False
    """Whether its scores of different layers cannot be compared."""
    of_statistics: bool = True
    """Whether every measured table has the columns it needs."""


def _heapr(x: Inputs) -> _Scores:
    tokens = np.maximum(x["tokens"], 1)
    return 0.5 * (x["sum_h2"] / tokens) * (x["sum_g2"] / tokens)


def _heapr_total(x: Inputs) -> _Scores:
    tokens = np.maximum(x["tokens"], 1)
    return 0.5 * x["sum_h2"] * x["sum_g2"] / tokens / x.N


def _fisher(x: Inputs) -> _Scores:
    return 0.5 * x["sum_hg2"] / x.N


def _weighted(x: Inputs) -> _Scores:
    tokens = np.maximum(x["tokens"], 1)
    return 0.5 * (x["sum_ph2"] / tokens) * (x["sum_g2"] / tokens)


def _shrunk(x: Inputs) -> _Scores:
    tokens = np.maximum(x["tokens"], 1)
    own, size = x["sum_g2"] / tokens, x["w_down_sq"]
    # If gradients had one variance γ in every direction, own would be γ ‖w_down‖².
    per_size = np.divide(x["sum_g2"], size, out=np.zeros_like(size), where=size > 0)
    _, layer = np.unique(x["layer"], return_inverse=True)
    # Of a model that was pruned, what is gone has no weight and no gradient.
    routed = np.bincount(layer, np.where(size > 0, x["tokens"], 0.0))
    routed = np.maximum(routed, 1)
    expected = (np.bincount(layer, per_size) / routed)[layer] * size
    return 0.5 * (x["sum_ph2"] / tokens) * np.sqrt(own * expected)


def _elimination(x: Inputs) -> _Scores:
    return x["elimination"]


def _taylor(x: Inputs) -> _Scores:
    return (0.5 * x["sum_hg2"] - x["sum_hg"]) / x.N


def _camera(x: Inputs) -> _Scores:
    alpha = float(x.options["alpha"])
    largest = x["max_abs_ph"]
    return x["w_down_sq"] * ((1 - alpha) * x["sum_ph2"] + alpha * largest * largest)


def _magnitude(x: Inputs) -> _Scores:
    squares = x["w_down_sq"] + x["w_up_sq"]
    return squares + x["w_gate_sq"] if x.gated else squares


def _frequency(x: Inputs) -> _Scores:
    return x["tokens"]


def _random(x: Inputs) -> _Scores:
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
                per_predicted_token=True,
            ),
            Estimator(
                "fisher",
                "½ · mean (h · ∂ℓ/∂h)²: the joint second moment, per predicted token",
                _fisher,
                unit=PER_TOKEN,
                needs=("sum_hg2",),
                per_predicted_token=True,
            ),
            Estimator(
                "weighted",
                "the paper's score of p · h, as the router weights it, in place of h",
                _weighted,
                unit=PER_ROUTED_TOKEN,
                needs=("tokens", "sum_ph2", "sum_g2"),
            ),
            Estimator(
                "shrunk",
                "weighted, with mean (∂ℓ/∂h)² shrunk halfway, in the logarithm, to "
                "what its layer's mean gradient variance and ‖w_down‖² predict",
                _shrunk,
                unit=PER_ROUTED_TOKEN,
                needs=("layer", "tokens", "sum_ph2", "sum_g2", "w_down_sq"),
            ),
            Estimator(
                "elimination",
                "what the output loses when the atom's turn comes, if those that stay "
                "make up for it; of `eliminate`, which adds a forward pass",
                _elimination,
                unit=PER_ROUTED_TOKEN,
                needs=("elimination",),
                of_statistics=False,
            ),
            Estimator(
                "taylor",
                "fisher with the first-order term −h · ∂ℓ/∂h kept; may be negative",
                _taylor,
                unit=PER_TOKEN,
                needs=("sum_hg", "sum_hg2"),
                per_predicted_token=True,
            ),
            Estimator(
                "camera",
                "CAMERA-P: energy and peak of p · h times ‖w_down‖², within a layer",
                _camera,
                needs=("w_down_sq", "sum_ph2", "max_abs_ph"),
                options={"alpha": 0.9},
                within_layer=True,
            ),
            Estimator(
                "magnitude",
                "control: squared norm of the atom's weights, no data",
                _magnitude,
                needs=("w_down_sq", "w_up_sq"),
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
                options={"seed": 0},
            ),
        )
    }
)
"""Every estimator by name."""

_SECOND_ORDER = frozenset(
    {"heapr", "heapr_total", "fisher", "weighted", "shrunk", "taylor"}
)


def find_estimator(name: str) -> Estimator:
    """The estimator of that name.

    Raises:
        SpecError: there is none.
    """
    if name not in ESTIMATORS:
        raise SpecError(
            f"unknown estimator {name!r}; choose one of {', '.join(ESTIMATORS)}"
        )
    return ESTIMATORS[name]


def unit_of(name: str | None) -> str:
    """The unit of the scores that are called `name`; arbitrary where it is unknown."""
    return ESTIMATORS[name].unit if name and name in ESTIMATORS else _NO_UNIT


def complete_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with the defaults of estimator `name` for those not given.

    Raises:
        SpecError: the estimator has no such option, or not such a value.
    """
    known = find_estimator(name).options
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise SpecError(
            f"estimator {name!r} has no option {', '.join(unknown)}; "
            f"it has {', '.join(known) or 'none'}"
        )
    complete = {**known, **options}
    if "alpha" in complete:
        complete["alpha"] = _alpha(complete["alpha"])
    if "seed" in complete:
        complete["seed"] = _seed(complete["seed"])
    return complete


def _alpha(value: Any) -> float:
    if isinstance(value, int | float | np.number) and 0 <= value <= 1:
        return float(value)
    raise SpecError(f"alpha must be a number in [0, 1], got {value!r}")


def _seed(value: Any) -> int:
    if isinstance(value, int | np.integer) and value >= 0:
        return int(value)
    raise SpecError(f"seed must be a whole number from 0, got {value!r}")


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
        frame: rows (layer, expert, atom) with the columns the estimator needs.
        metadata: of the table; `N`, and `architecture` where there is one.
        estimator: a name in `ESTIMATORS`.
        options: of the estimator (`alpha` of camera, `seed` of random).

    Raises:
        SpecError: a column, N or a finite value is missing.

    Example:
        Two tokens with h = 1, 3 and ∂ℓ/∂h = 2, 0: ½ · 10/2 · 4/2 = 5.

        >>> row = pd.DataFrame({"tokens": [2], "sum_h2": [10.0], "sum_g2": [4.0]})
        >>> float(score(row, {})[0])
        5.0
    """
    chosen = find_estimator(estimator)
    gated = "w_gate_sq" in frame
    needs = _needed(chosen, metadata, gated=gated)
    missing = [name for name in needs if name not in frame]
    if missing:
        raise SpecError(
            f"estimator {estimator!r} needs column {', '.join(missing)}; the table has "
            f"{', '.join(map(str, frame.columns))}; read or collect it with that column"
        )
    N = _predicted_tokens(chosen, metadata)
    inputs = Inputs(frame, N, complete_options(estimator, options), gated)
    with np.errstate(invalid="ignore", over="ignore"):
        values = chosen.formula(inputs)
    if estimator in _SECOND_ORDER and "tokens" in frame:
        values = np.where(frame["tokens"].to_numpy() > 0, values, 0.0)
    _check_finite(frame, values, estimator=estimator, needs=needs)
    return values


def _needed(
    chosen: Estimator, metadata: Mapping[str, Any], *, gated: bool
) -> tuple[str, ...]:
    """The columns to read: of magnitude also w_gate_sq, where the model has gates."""
    if chosen.name != "magnitude":
        return chosen.needs
    # A table read without w_gate_sq must not silently score as if it had no gates.
    layers = (metadata.get("architecture") or {}).get("layers", {})
    has_gates = any(shape.get("n_matrices") == 3 for shape in layers.values())
    return (*chosen.needs, "w_gate_sq") if gated or has_gates else chosen.needs


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


def _check_finite(
    frame: pd.DataFrame, values: _Scores, *, estimator: str, needs: tuple[str, ...]
) -> None:
    """Make sure that every score is finite.

    Raises:
        SpecError: one is not; names the columns and the first rows.
    """
    bad = ~np.isfinite(values)
    if not bad.any():
        return
    rows = np.flatnonzero(bad)
    columns = [n for n in needs if not np.isfinite(frame[n].to_numpy()[rows]).all()]
    keys = [name for name in ("layer", "expert", "atom") if name in frame]
    atoms = frame[keys].iloc[rows[:_SHOWN]].to_numpy().tolist()
    more = " ..." if len(rows) > _SHOWN else ""
    raise SpecError(
        f"{len(rows)} {estimator!r} scores are not finite because of column "
        f"{', '.join(columns) or 'values too large'}, at ({', '.join(keys)}) "
        f"{', '.join(str(tuple(atom)) for atom in atoms)}{more}; collect again, with "
        "dtype float32 if the model overflows in a smaller one"
    )
