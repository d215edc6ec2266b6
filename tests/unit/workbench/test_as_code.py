"""What is copied as Python or as a command prunes what the panel shows, or is refused.

Each text is run on a tiny model, and its mask compared with that of the objects.
"""

import re
import shlex
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from commands import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.as_command import MASK, MODEL, as_command
from heapr_lab.workbench.as_python import as_python
from heapr_lab.workbench.export import Afterwards, choose
from heapr_lab.workbench.opening import Opening
from heapr_lab.workbench.presets import WEIGHTS
from heapr_lab.workbench.recipe import Recipe, Written
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

OTHER: dict[str, dict[str, Any]] = {
    "ratio": {"ratio": 0.29},
    "estimator": {"estimator": "shrunk"},
    "scope": {"scope": "layer"},
    "granularity": {"granularity": "expert"},
    "structure": {"structure": "per_layer"},
    "multiple": {"structure": "aligned", "multiple": 4},
    "of": {"of": "flops"},
    "layer_ratios": {"layer_ratios": {1: 0.75}},
    "exclude_layers": {"exclude_layers": (0,)},
    "min_atoms": {"min_atoms": 3},
    "protect_outliers": {"protect_outliers": 0.5},
    "protect_unrouted": {"protect_unrouted": True},
    "price": {"price": 0.25},
    "estimator_options": {
        "estimator": "camera", "scope": "layer", "estimator_options": {"alpha": 0.5}
    },
}  # fmt: skip
"""By field of a selection, one in which it is not the default."""
CALIBRATIONS: dict[str, Any] = {
    "corpus": None,
    "n_sequences": 3,
    "seq_len": 16,
    "seed": -5,
    "own_text": 0.5,
}
OPENINGS: dict[str, Any] = {
    "model": None,
    "profile": "small",
    "seq_len": 32,
    "device": "cpu",
    "dtype": "bfloat16",
    "stream": True,
    "host_memory": "1GB",
}


@pytest.fixture
def inside(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run code in, with names that a shell and Python must quote."""
    (tmp_path / "a 'moe'").symlink_to(root / "moe")
    (tmp_path / "it's $text.txt").symlink_to(root / "text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(**options: Any) -> Opening:
    """The tiny model, opened with little text."""
    return Opening.of("a 'moe'", **{"profile": "small"} | options)


def texts(**fields_: Any) -> Calibration:
    """The tiny text."""
    return Calibration("it's $text.txt", **fields_)


def mask_of_python(recipe: Recipe) -> KeepMask:
    """The mask of the copied Python, which is run."""
    names: dict[str, Any] = {}
    exec(as_python(recipe).text, names)
    keep = names["keep"]
    assert isinstance(keep, KeepMask)
    return keep


def run_command(recipe: Recipe, model: str = "") -> None:
    """Run the copied command in this process, line by line."""
    for line in as_command(recipe).text.splitlines():
        program, *words = shlex.split(line)
        assert program == "heapr-lab"
        run(*(model if word == MODEL else word for word in words))


def mask_of_command(recipe: Recipe, model: str = "") -> KeepMask:
    """The mask that the copied command writes."""
    Path(MASK).unlink(missing_ok=True)
    run_command(recipe, model)
    return KeepMask.read(MASK)


def mask_of_objects(recipe: Recipe) -> KeepMask:
    """The mask of the selection, from a model opened by hand."""
    assert isinstance(recipe.source, Opening)
    bench = open_workbench(recipe.source.model, **recipe.source.given())
    return bench.keep(Setting(recipe.selection, recipe.calibration))


def same_masks(recipe: Recipe) -> None:
    """All three prune the same atoms, and some."""
    expected = mask_of_objects(recipe)
    assert 0 < expected.n_removed < expected.n_atoms
    assert mask_of_python(recipe).fingerprint == expected.fingerprint
    assert mask_of_command(recipe).fingerprint == expected.fingerprint


def test_the_tables_here_have_every_field() -> None:
    """A field added to a selection, a calibration or an opening is tried here."""
    assert list(OTHER) == [field.name for field in fields(Selection)]
    assert list(CALIBRATIONS) == [field.name for field in fields(Calibration)]
    assert list(OPENINGS) == [field.name for field in fields(Opening)]


@pytest.mark.parametrize("name", OTHER)
def test_each_field_of_a_selection(name: str, inside: Path) -> None:
    """It is in both texts, which select as it says; or the command is refused."""
    selection = Selection(**{"ratio": 0.3} | OTHER[name])
    assert getattr(selection, name) != getattr(Selection(0.3), name)
    recipe = Recipe(opened(), selection, texts())
    if name not in {"layer_ratios", "estimator_options"}:
        same_masks(recipe)
        return
    expected = mask_of_objects(recipe)
    assert mask_of_python(recipe).fingerprint == expected.fingerprint
    with pytest.raises(SpecError, match=f"no option for {name}: copy the Python"):
        as_command(recipe)


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_each_field_of_a_calibration(name: str, inside: Path) -> None:
    """The same windows are drawn, and of as many tokens."""
    value = CALIBRATIONS[name]
    own = {} if value is None else {name: value}
    same_masks(Recipe(opened(), Selection(0.5), texts(**own)))


@pytest.mark.parametrize("name", OPENINGS)
def test_each_way_to_open_a_model(name: str, inside: Path) -> None:
    """The options of a workbench reach it again, by both ways."""
    value = OPENINGS[name]
    own = {} if value is None else {name: value}
    own |= {"stream": True} if name == "host_memory" else {}
    recipe = Recipe(opened(**own), Selection(0.5), texts())
    same_masks(recipe)
    if value not in {None, True}:
        assert f"{name}={value!r}" in as_python(recipe).text
        assert f"--{name.replace('_', '-')} {value}" in as_command(recipe).text


def test_defaults_are_left_out() -> None:
    """What everyone has need not be said."""
    written = Written("pruned", "compress")
    recipe = Recipe(
        Opening("lab"), Selection(0.25), Calibration(own_text=0.25), written
    )
    assert as_command(recipe).text == "heapr-lab prune lab --ratio 0.25 --out pruned"
    assert as_python(recipe).text.splitlines()[2:] == [
        "bench = hl.open_workbench('lab')",
        "calibration = hl.Calibration(own_text=0.25)",
        "windows = bench.calibration_set(calibration)",
        "smaller = hl.compress(bench.model, windows, ratio=0.25)",
        "keep = smaller.heapr_keep",
        "hl.save_pruned(smaller, 'pruned', tokenizer=bench.tokenizer)",
    ]


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    """Selections of the tiny model, of everything that goes together."""
    some: dict[str, Any] = {"ratio": draw(st.integers(10, 40)) / 100}
    names = ("scope", "of", "min_atoms", "protect_unrouted", "exclude_layers", "price")
    for name in draw(st.sets(st.sampled_from(names), max_size=3)):
        some |= OTHER[name]
    some["estimator"] = draw(st.sampled_from(["heapr", "shrunk", "random", "taylor"]))
    structure = draw(st.sampled_from(["ragged", "aligned", "per_layer", "uniform"]))
    if "exclude_layers" in some and structure == "uniform":
        structure = "per_layer"
    least = {} if structure in {"ragged"} else {"multiple": draw(st.integers(1, 4))}
    if structure in {"per_layer", "uniform"} and draw(st.booleans()):
        least = {}
    return Selection(**some, structure=structure, **least)


@given(selections())
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_selection(inside: Path, selection: Selection) -> None:
    """Whatever goes together: also a structure whose multiple nobody gave."""
    recipe = Recipe(opened(), selection, texts(seed=1))
    try:
        mask_of_objects(recipe)
    except SpecError:  # too much, with these constraints
        return
    same_masks(recipe)


def test_a_table_alone(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Its file is named; the command needs the model, and says so."""
    monkeypatch.chdir(tmp_path)
    file = folder / "table.parquet"
    for selection in (
        Selection(0.3),
        Selection(0.3, "shrunk"),
        Selection(0.3, "camera", "layer"),
    ):
        recipe, table = Recipe(file, selection), ImportanceTable.read(file)
        expected = select(table, selection).fingerprint
        assert mask_of_python(recipe).fingerprint == expected
        found = mask_of_command(recipe, str(folder / "moe"))
        assert found.fingerprint == expected
        assert "write it for MODEL" in as_command(recipe).notes[0]


@pytest.mark.parametrize(
    "ratio", [Fraction(1, 3), Decimal("0.12345678901234567890123")]
)
def test_a_number_that_is_no_float(ratio: Any, inside: Path) -> None:
    """Python has it exactly, the command line cannot."""
    recipe = Recipe(opened(), Selection(ratio), texts())
    found = re.search(r"ratio=(Fraction\(\d+, \d+\))", as_python(recipe).text)
    assert found is not None
    assert eval(found[1], {"Fraction": Fraction}) == Fraction(ratio)
    expected = mask_of_objects(recipe).fingerprint
    assert mask_of_python(recipe).fingerprint == expected
    with pytest.raises(SpecError, match="takes decimals"):
        as_command(recipe)


# --- checkpoints ----------------------------------------------------------------------


def same_files(one: Path, other: Path) -> None:
    """The same atoms and the same numbers."""
    masks = [KeepMask.read(path / "heapr_keep.parquet") for path in (one, other)]
    assert masks[0].fingerprint == masks[1].fingerprint
    weights = [load_file(path / "model.safetensors") for path in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert (tensor == weights[1][name]).all(), name


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("after", [False, True])
def test_checkpoints_have_the_same_weights(
    weights: str, after: bool, inside: Path
) -> None:
    """Python and the command write the same numbers, with biases and training too."""
    own = 0.5 if weights == "compress" else 0.0
    made = Written("a folder", weights, after, 25 * after, corpora=())
    recipe = Recipe(opened(), Selection(0.4, scope="layer"), texts(own_text=own), made)
    keep = mask_of_python(recipe)
    assert keep == KeepMask.read("a folder/heapr_keep.parquet")
    Path("a folder").rename("of python")
    run_command(recipe)
    same_files(inside / "of python", inside / "a folder")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_export_chooses(weights: str, inside: Path, bench: Workbench) -> None:
    """The mask of the copied command is the one that Export writes.

    Also of an estimator with options, for which `compress` takes another one.
    """
    selection, calibration = Selection(0.4, "camera", "layer"), texts(own_text=0.5)
    setting = Setting(selection, calibration)
    table = bench.table_of(setting)
    expected = choose(
        bench, table, setting, weights=weights, after=Afterwards(),
        report=lambda *_: None,
    ).keep  # fmt: skip
    made = Written("pruned", weights, corpora=())
    run_command(Recipe(opened(), selection, calibration, made))
    found = KeepMask.read("pruned/heapr_keep.parquet")
    assert found.fingerprint == expected.fingerprint


def test_what_the_command_line_would_do_otherwise_is_refused() -> None:
    """A folder that it takes for a mask, and a name that it would split."""
    recipe = Recipe(Opening("lab"), Selection(0.5))
    mask = replace(recipe, written=Written("a.parquet", "unchanged"))
    with pytest.raises(SpecError, match="the file of a mask"):
        as_command(mask)
    card = Written("pruned", "unchanged", corpora=("a,b.txt",))
    with pytest.raises(SpecError, match="separated by commas"):
        as_command(replace(recipe, written=card))


def test_another_dtype_and_other_test_windows_are_said() -> None:
    """What differs in the files is beside the text."""
    made = Written("pruned", "unchanged", dtype="bfloat16")
    recipe = Recipe(Opening("lab"), Selection(0.5), Calibration(seq_len=64), made)
    assert any("write bfloat16" in note for note in as_python(recipe).notes)
    assert any("test windows" in note for note in as_command(recipe).notes)
