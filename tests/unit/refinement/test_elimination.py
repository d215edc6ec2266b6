"""Costs of elimination by hand, and what a table says of how they were found."""

import pytest
import torch
from families import tiny_model, tiny_windows
from heard import Heard
from oracles.features import COUPLED, grams_of, two_columns

from heapr_lab import ImportanceTable, collect_statistics
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.refinement.activation_grams import iter_grams
from heapr_lab.refinement.elimination import eliminate, elimination_spec, layer_costs
from heapr_lab.storage.hashing import digest

WINDOWS = tiny_windows(n_sequences=4, seq_len=12)


@pytest.fixture(scope="module")
def table(model) -> ImportanceTable:
    """The model's statistics."""
    return collect_statistics(model, WINDOWS)


@pytest.fixture
def layer() -> ExpertsLayer:
    """Columns of the first expert, which `costs_of` replaces."""
    return two_columns()


# --- by hand ----------------------------------------------------------------------

# The ridge 1/2 adds half of each diagonal element of `COUPLED`, 1: C + λ S² is
# [3 1; 1 3], and its inverse B is [3 -1; -1 3] / 8.


def costs_of(
    layer: ExpertsLayer,
    columns: list[float],
    energy: float,
    *,
    products: list[list[float]] = COUPLED,
    ridge: float = 0.5,
    n_steps: int = 8,
) -> list[float]:
    """The costs of the first expert's atoms, whose columns have these entries.

    The sum of its scores is `energy`, that of its atoms unless a price is meant.
    """
    base = torch.zeros(4, 8)
    base[0, 3] = energy
    with torch.no_grad():
        layer.down[0, 5, : len(columns)] = torch.tensor(columns)
    grams = grams_of(products)
    costs = layer_costs(layer, grams, base, ridge=ridge, n_steps=n_steps)
    return list(costs[0].tolist())


@pytest.mark.parametrize(
    ("columns", "energy", "n_steps", "expected"),
    [
        # Later atoms never cost less: 8/3, then (1 - 1/3)² · 3 = 4/3, raised to 8/3.
        ([1.0, -1.0], 4.0, 8, [8 / 3, 8 / 3]),
        # Those of one step cost what they do at its start, as if the others stayed.
        ([2.0, 1.0], 10.0, 1, [32 / 3, 8 / 3]),
        # One that no token reaches costs nothing, and changes no other's cost.
        ([1.0, 2.0, 100.0], 10.0, 8, [8 / 3, 49 / 3, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_costs_of_two_coupled_atoms(layer, columns, energy, n_steps, expected):
    """By hand, in the order in which they go."""
    costs = costs_of(layer, columns, energy, n_steps=n_steps)
    assert costs[: len(expected)] == pytest.approx(expected)


def test_a_share_of_the_atoms_goes_in_each_step(layer):
    """Eight atoms in two steps are four and four, of which three are never routed."""
    C = (torch.full((5, 5), 1.0) + torch.eye(5)).tolist()
    columns = [1.0, 2.0, 3.0, 4.0, 5.0]
    costs = costs_of(layer, columns, 2.0 * 55, products=C, n_steps=2)
    # C + λ S² = 2 I + 11ᵀ, and so B = I/2 - 11ᵀ/14: 3/7 on its diagonal. With the first
    # atom go the three that no token reaches.
    assert costs[0] == pytest.approx(7 / 3)
    # Of four atoms (2 I + 11ᵀ)⁻¹ is I/2 - 11ᵀ/12: 5/12. The first one's column, 1, is
    # left to them in equal parts of 1/6.
    left = [(k + 1 / 6) ** 2 * 12 / 5 for k in (2, 3, 4, 5)]
    assert costs[1:5] == pytest.approx(left)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_costs_do_not_depend_on_the_scale_of_columns(layer, scale):
    """The rate makes up for it: λ = 1/20 adds 1/10, and leaves (2.1² - 1) / 2.1."""
    costs = costs_of(layer, [scale, 2 * scale], 10.0, ridge=0.05)
    first = 3.41 / 2.1
    # In all wᵀ(C + λ S²)w = 2.1 + 4 + 4 · 2.1.
    assert costs[:2] == pytest.approx([first, 14.5 - first], rel=1e-5)  # float32


# --- the table --------------------------------------------------------------------


def test_the_specification_has_all_that_determines_the_scores(model, table):
    """The table's is in it; a cache is keyed by it, so it is written out here.

    The small model goes by layers. Its one pass reports the windows. What else is known
    of the table stays.
    """
    done = Heard()
    scored = eliminate(model, table, WINDOWS, progress=done)
    assert done[-1] == (4, 4)
    spec = scored.metadata["spec"]
    assert spec == elimination_spec(table, WINDOWS)
    assert scored.metadata["spec_hash"] == digest(spec) != table.metadata["spec_hash"]
    for name in ("N", "architecture"):
        assert scored.metadata[name] == table.metadata[name]
    assert spec.pop("elimination") == {
        "span": None,
        "ridge": 0.03,
        "n_steps": 128,
        "calibration": WINDOWS.fingerprint,
        "schema": 2,
    }
    assert spec == table.metadata["spec"]
    nameless = ImportanceTable.from_frame(table.frame)
    assert list(elimination_spec(nameless, WINDOWS)) == ["elimination"]
    base = torch.tensor(table.score("fisher").to_numpy()).view(2, 4, 8)
    grams = iter_grams(model, WINDOWS, span="layer")
    costs = [
        layer_costs(*pair, bases, ridge=0.03, n_steps=128)
        for pair, bases in zip(grams, base, strict=True)
    ]
    scores = scored.frame["elimination"].tolist()
    assert torch.stack(costs).flatten().tolist() == scores


def test_scores_of_an_earlier_version_are_not_read(model, table, tmp_path, caplog):
    """The column is left out with a warning, and asking for it says what to do."""
    column = "elimination"
    new = eliminate(model, table, WINDOWS)
    new.write(tmp_path / "now.parquet")
    same = ImportanceTable.read(tmp_path / "now.parquet")
    assert same.score(column).equals(new.score(column))
    spec = new.metadata["spec"]
    spec[column] = {**spec[column], "schema": 1}
    metadata = {**new.metadata, "spec": spec, "spec_hash": digest(spec)}
    old = ImportanceTable.from_frame(new.frame, **metadata)
    old.write(tmp_path / "old.parquet")
    read = ImportanceTable.read(tmp_path / "old.parquet")
    assert f"left out {column}" in caplog.text
    assert read.score("heapr").equals(new.score("heapr"))
    with pytest.raises(SpecError, match=f"needs column {column}"):
        read.score(column)


def test_a_table_of_another_model_of_the_same_shapes(table):
    """Elimination compares identities, not only shapes."""
    with pytest.raises(SpecError, match="another model: it differs in weights"):
        eliminate(tiny_model("qwen2_moe", seed=1), table, WINDOWS)
