"""Costs of elimination by hand, and what a table says of how they were found."""

from pathlib import Path

import pytest
import torch
from families import tiny_ids, tiny_model
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.refinement.activation_grams import LayerGrams, collect_grams
from heapr_lab.refinement.elimination import (
    eliminate,
    elimination_spec,
    layer_costs,
    with_elimination,
)
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=4, seq_len=12))


@pytest.fixture(scope="module")
def table(model: nn.Module) -> ImportanceTable:
    """The model's statistics."""
    return collect_statistics(model, WINDOWS)


@pytest.fixture
def layer() -> ExpertsLayer:
    """Four experts of eight atoms in 16 dimensions, whose W_down is 0."""
    layer = find_experts(tiny_model("qwen2_moe"))[0]
    with torch.no_grad():
        layer.down.zero_()
    return layer


def grams_of(*blocks: list[list[float]], span: str = "expert") -> LayerGrams:
    """Sums over eight tokens of each expert, 0 but for the first atoms of the first."""
    sums = torch.zeros(2, 4, 8, 8, dtype=torch.float64)
    for expert, block in enumerate(blocks):
        values = torch.tensor(block, dtype=torch.float64)
        sums[0, expert, : len(block), : len(block)] = values
    return LayerGrams(span, sums, torch.full((2, 4), 4))


# --- by hand ----------------------------------------------------------------------

# The ridge 1/2 adds half of each diagonal element, 1: C + λ S² = [3 1; 1 3], and its
# inverse B is [3 -1; -1 3] / 8.
COUPLED = [[2.0, 1.0], [1.0, 2.0]]


def test_later_atoms_never_cost_less(layer: ExpertsLayer) -> None:
    """Columns (1, -1): 8/3, then (1 - 1/3)² · 3 = 4/3, which is raised to 8/3."""
    with torch.no_grad():
        layer.down[0, 5, :2] = torch.tensor([1.0, -1.0])
    base = torch.zeros(4, 8)
    base[0, 3] = 4.0  # as much as the energy
    costs = layer_costs(layer, grams_of(COUPLED), base, ridge=0.5, n_steps=8)
    assert costs[0, :2].tolist() == pytest.approx([8 / 3, 8 / 3])


def test_atoms_of_one_step_cost_what_they_do_at_its_start(layer: ExpertsLayer) -> None:
    """Both at once: 8/3 and 4 · 8/3, as if the other one stayed."""
    with torch.no_grad():
        layer.down[0, 5, :2] = torch.tensor([2.0, 1.0])
    base = torch.zeros(4, 8)
    base[0, 3] = 10.0  # as much as the energy
    costs = layer_costs(layer, grams_of(COUPLED), base, ridge=0.5, n_steps=1)
    assert costs[0, :2].tolist() == pytest.approx([32 / 3, 8 / 3])


def test_a_share_of_the_atoms_goes_in_each_step(layer: ExpertsLayer) -> None:
    """Eight atoms in two steps are four and four, of which three are never routed."""
    C = torch.full((5, 5), 1.0) + torch.eye(5)
    with torch.no_grad():
        layer.down[0, 5, :5] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    base = torch.zeros(4, 8)
    base[0, 0] = 2.0 * 55  # as much as the energy
    costs = layer_costs(layer, grams_of(C.tolist()), base, ridge=0.5, n_steps=2)
    # C + λ S² = 2 I + 11ᵀ, and so B = I/2 - 11ᵀ/14: 3/7 on its diagonal. With the first
    # atom go the three that no token reaches.
    assert costs[0].tolist()[:1] == pytest.approx([7 / 3])
    # Of four atoms (2 I + 11ᵀ)⁻¹ is I/2 - 11ᵀ/12: 5/12. The first one's column, 1, is
    # left to them in equal parts of 1/6.
    left = [(k + 1 / 6) ** 2 * 12 / 5 for k in (2, 3, 4, 5)]
    assert costs[0, 1:5].tolist() == pytest.approx(left)


def test_an_atom_that_no_token_reaches_costs_nothing(layer: ExpertsLayer) -> None:
    """Whatever its column, and it changes no other's cost."""
    with torch.no_grad():
        layer.down[0, 5, :3] = torch.tensor([1.0, 2.0, 100.0])
    base = torch.zeros(4, 8)
    base[0, 3] = 10.0
    costs = layer_costs(layer, grams_of(COUPLED), base, ridge=0.5, n_steps=8)
    assert costs[0].tolist() == pytest.approx([8 / 3, 49 / 3, 0, 0, 0, 0, 0, 0])


def test_costs_do_not_depend_on_the_scale_of_columns(layer: ExpertsLayer) -> None:
    """The rate makes up for it: λ = 1/20 adds 1/10, and leaves (2.1² - 1) / 2.1."""
    base = torch.zeros(4, 8)
    base[0, 3] = 10.0
    for scale in (1.0, 1e-6):
        with torch.no_grad():
            layer.down[0, 5, :2] = scale * torch.tensor([1.0, 2.0])
        costs = layer_costs(layer, grams_of(COUPLED), base, ridge=0.05, n_steps=8)
        first = 3.41 / 2.1
        # In all wᵀ(C + λ S²)w = 2.1 + 4 + 4 · 2.1.
        expected = pytest.approx([first, 14.5 - first], rel=1e-5)  # float32
        assert costs[0, :2].tolist() == expected


# --- the table --------------------------------------------------------------------


def test_the_specification_has_all_that_determines_the_scores(
    model: nn.Module, table: ImportanceTable
) -> None:
    """The table's is in it; a cache is keyed by it, so it is written out here."""
    spec = eliminate(model, table, WINDOWS).metadata["spec"]
    assert spec == elimination_spec(table, WINDOWS)
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


def test_settings_are_those_that_the_specification_names(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Whichever function is called; the small model goes by layers."""
    expected = eliminate(model, table, WINDOWS).frame["elimination"]
    layers = find_experts(model)
    sums = collect_grams(model, WINDOWS, span="layer")
    pairs = [(layer, sums[layer.layer]) for layer in layers]
    assert with_elimination(table, pairs).frame["elimination"].equals(expected)
    base = torch.tensor(table.score("fisher").to_numpy()).view(2, 4, 8)
    costs = [
        layer_costs(*pair, bases, ridge=0.03, n_steps=128)
        for pair, bases in zip(pairs, base, strict=True)
    ]
    assert torch.stack(costs).flatten().tolist() == expected.tolist()


def test_without_a_specification_the_table_has_none(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Not that of the table it was made of, which other numbers would belong to."""
    sums = collect_grams(model, WINDOWS)
    pairs = [(layer, sums[layer.layer]) for layer in find_experts(model)]
    metadata = with_elimination(table, pairs).metadata
    assert {"spec", "spec_hash"} & metadata.keys() == set()
    assert metadata["N"] == table.metadata["N"]
    assert metadata["architecture"] == table.metadata["architecture"]
    named = with_elimination(table, pairs, spec={"a": 1}).metadata
    assert named["spec"] == {"a": 1}


def test_progress_counts_the_windows(model: nn.Module, table: ImportanceTable) -> None:
    """The windows are those of its one pass."""
    done: list[tuple[int, int]] = []
    eliminate(model, table, WINDOWS, progress=lambda *now: done.append(now))
    assert done[-1] == (4, 4)


def test_scores_of_an_earlier_version_are_not_read(
    model: nn.Module,
    table: ImportanceTable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_a_table_of_another_model_of_the_same_shapes(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Elimination compares identities, not only shapes."""
    twin = tiny_model("qwen2_moe", seed=1)
    with pytest.raises(SpecError, match="another model: it differs in weights"):
        eliminate(twin, table, WINDOWS)
    assert eliminate(model, table, WINDOWS).n_atoms == table.n_atoms
    bare = ImportanceTable.from_frame(table.frame, N=table.metadata["N"])
    assert eliminate(model, bare, WINDOWS).n_atoms == table.n_atoms
