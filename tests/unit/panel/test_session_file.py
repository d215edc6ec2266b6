"""A session is opened as it was saved, or refused without changing anything."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pressing import press, told
from random_tables import random_table, small_table

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.answer import answers
from heapr_lab.panel.opening import explore
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.session_file import VERSION, fingerprint_of
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import open_workbench

Fresh = Callable[..., Explorer]


def used(panel: Explorer) -> Explorer:
    """A panel in which everything that is saved was changed."""
    controls = panel.controls
    controls.ratio.value = "0.25"
    controls.estimator.value = "fisher"
    panel.comparison.pin()
    panel.comparison.label.value = "aligned <b>"
    controls.structure.value = "aligned"
    controls.multiple.value = 2
    panel.comparison.pin()
    panel.evaluation.tasks.value = panel.evaluation.tasks.options
    press(panel.evaluation.job)
    panel.comparison.runs.methods.value = ("heapr",)
    press(panel.comparison.runs.job)
    controls.ratio.value = "0.375"
    controls.scope.value = "layer"
    controls.min_atoms.value = 1
    controls.excluded.value = "1"
    panel.inspection.text.value = "Another text: “größer”, of the model."
    return panel


def state(panel: Explorer) -> dict[str, Any]:
    """What a person sees of all that is saved."""
    shown = {name: panel.controls.__dict__[name].value for name in _CONTROLS}
    return shown | {
        "selection": panel.session.selection,
        "keep": panel.session.keep.fingerprint,
        "pins": list(panel.comparison.pins),
        "compared": panel.comparison.table.value,
        "points": panel.session.points.to_json(default_handler=repr),
        "said": (panel.status.value, panel.error.value),
        "inspected": panel.inspection.text.value,
        "calibration": panel.session.calibration,
    }


_CONTROLS = (
    "slider", "ratio", "budget", "estimator", "scope", "granularity", "structure",
    "multiple", "min_atoms", "excluded",
)  # fmt: skip


@pytest.fixture(scope="module")
def fresh(bench, root) -> Fresh:
    """Makes a panel of the tiny model and its text."""
    text = str(root / "text.txt")
    here = {"corpora": (text,), "tasks": (f"continuation:{text}",)}

    def make(source: Any = bench, **options: Any) -> Explorer:
        if "session" not in options:
            options.setdefault("calibration", Calibration(text, seed=3))
        return explore(source, **here, **options)

    return make


def save(panel: Explorer, path: Path) -> dict[str, Any]:
    """The content of the file that the button writes."""
    assert told(panel, path).count("Saved to") == 1
    return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def saved(fresh, tmp_path_factory) -> tuple[Explorer, Path]:
    """A panel that was used, and its session in a file; no test changes them."""
    panel, file = used(fresh()), tmp_path_factory.mktemp("session") / "s.json"
    save(panel, file)
    return panel, file


def test_a_session_is_opened_as_it_was(saved, fresh, tmp_path):
    """It is opened with the button, by name, and again after a second round."""
    panel, file = saved[0], tmp_path / "my session.json"
    plain = save(panel, file)
    before = state(panel)
    assert len(before["pins"]) == 2
    assert "heapr 25%" in before["compared"]
    assert len(panel.session.points) == 4  # dense and pruned, of a corpus and a task
    again = fresh()
    assert state(again) != before
    assert "Opened" in told(again, file, "open")
    assert state(again) == before
    assert state(fresh(session=file)) == before
    assert save(again, tmp_path / "second.json") == plain
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "my session.json", "second.json"
    ]  # fmt: skip
    again.comparison.pin()  # the next label is free
    assert len(again.comparison.pins) == 3
    press(again.evaluation.job)
    assert len(again.session.points) == 5  # on the corpus alone, by default


def test_a_table_of_an_extra_pass_is_measured_again(fresh, tmp_path):
    """Although the selection that was saved last does not need that pass."""
    panel = fresh(selection=Selection(0.25, "elimination"))
    panel.comparison.pin()
    panel.controls.estimator.value = "heapr"
    save(panel, tmp_path / "s.json")
    reopened = fresh(session=tmp_path / "s.json")
    assert reopened.session.selection.estimator == "heapr"
    assert reopened.comparison.pins[0].selection.estimator == "elimination"
    assert fingerprint_of(reopened.session.table) == fingerprint_of(panel.session.table)


def test_a_table_alone(saved, fresh, tmp_path, folder):
    """It shows a session of the model, and passes on what only a model can use."""
    (panel, file), table = saved, tmp_path / "table.parquet"
    plain = json.loads(file.read_text())
    panel.session.table.write(table)
    alone = explore(table, session=file)
    assert alone.comparison.table.value == panel.comparison.table.value
    again = save(alone, tmp_path / "again.json")
    windows = {"n_sequences": 8, "seq_len": 64}  # which the profile has
    assert again == plain | {"calibration": plain["calibration"] | windows}
    reopened = fresh(session=tmp_path / "again.json")
    assert reopened.comparison.table.value == panel.comparison.table.value
    other = explore(folder / "table.parquet")
    assert "of another model, calibration or table" in told(other, file, "open")


def test_another_model_calibration_or_profile(saved, fresh, root):
    """Refused, with both fingerprints or both amounts of test data."""
    panel, file = saved
    other = fresh(calibration=Calibration(str(root / "text.txt"), seed=4))
    before, message = state(other), told(other, file, "open")
    actual, wanted = (fingerprint_of(p.session.table)[:12] for p in (other, panel))
    assert actual in message
    assert wanted in message
    assert state(other) == before
    small = open_workbench(str(root / "moe"), profile="small")
    small.profile = small.profile.__class__(**{**vars(small.profile), "n_test": 3})
    message = told(fresh(small), file, "open")
    assert "expected" in message
    assert "n_test=3" in message
    with pytest.raises(SpecError, match="give no other"):
        fresh(session=file, selection=Selection(0.5))


def test_a_session_of_before_is_opened(saved, fresh, tmp_path):
    """With a map of experts, numbers of Inspect, and recipes that could not heal.

    It is saved anew without them.
    """
    panel, file = saved[0], tmp_path / "s.json"
    old = json.loads(saved[1].read_text()) | {
        "map": {"variable": "kept share", "pin": 1}
    }
    old["inspected"] |= dict.fromkeys(("n_tokens", "layer", "position"), 1)
    old["inspected"] |= dict.fromkeys(("atom_layer", "expert", "atom"), 99)
    for recipe in (old["way"], *(pin["way"] for pin in old["pins"])):
        assert recipe.pop("heal") == 0
    file.write_text(json.dumps(old))
    other = fresh()
    assert "Opened" in told(other, file, "open")
    assert state(other) == state(panel)
    anew = save(other, file)
    assert "map" not in anew
    assert [*anew["inspected"]] == ["text"]


def _changed(plain: Any, path: tuple[Any, ...], value: Any) -> str:
    copy = json.loads(json.dumps(plain))
    *way, last = path
    place = copy
    for step in way:
        place = place[step]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(copy)


WRONG: list[tuple[tuple[Any, ...], Any]] = [
    (("version",), VERSION + 1), (("version",), KeyError), (("kind",), "notebook"),
    (("table",), 5), (("table",), "0" * 64), (("measured_for",), "best"),
    (("tests",), {"seq_len": 64}), (("tests", "n_test"), "4"), (("tests",), None),
    (("calibration", "seed"), 0.5), (("selection",), []),
    (("selection", "ratio"), 1.5), (("selection", "ratio"), KeyError),
    (("selection", "price"), 0.5), (("selection", "multiple"), 99),
    (("selection", "estimator"), "fast"), (("selection", "layer_ratios"), [1]),
    (("selection", "layer_ratios"), {"0": 0.5}), (("selection", "ratio"), 0.9),
    (("pins", 0), "A"), (("pins", 1, "selection", "scope"), "nowhere"),
    (("pins", 1, "selection", "exclude_layers"), [7]),
    (("points", 0), 3), (("points", 1, "nll"), "low"), (("points", 1, "nll"), math.nan),
    (("points", 1, "summed_score"), KeyError), (("points", 1, "extra"), 1),
    (("points", 1, "selection"), {"ratio": 2}), (("inspected", "text"), 3),
    (("pins", 0, "selection", "price"), 0.5), (("pins", 0, "way", "rounds"), 5),
    (("points", -1, "selection", "price"), 0.5), (("way", "rounds"), 5),
    (("calibration", "windows"), 3), (("selection", "ratios"), 0.5),
    (("way", "weights"), "magic"), (("way", "own_text"), 1.5), (("texts",), KeyError),
    (("methods", 0), {"foo": 1.0}), (("methods", 0, "achieved_ratio"), "many"),
    (("methods", 0, "label"), None), (("methods", 0, "bytes_reduction"), "1"),
    (("points", 0), KeyError), (("points", 1), KeyError),
]  # fmt: skip
SAID: list[tuple[tuple[Any, ...], Any, str]] = [
    (("version",), 9, "Invalid enum value 9 - at `$.version`"),
    (("kind",), "notebook", "no session of the panel"),
    (("pins",), KeyError, "missing required field `pins`"),
    (("selection", "ratio"), "half", "`float`, got `str` - at `$.selection.ratio`"),
    (("points", 0), KeyError, "no point of the dense model"),
    (("points", 1), KeyError, "no point of the dense model"),
    (("points", -1, "stderr"), -1.0, "negative values"),  # as what draws it says
]


def test_a_wrong_file_changes_nothing(saved, fresh, tmp_path):
    """Whichever part is missing or wrong, the panel stays and says so."""
    file, bad = saved[1], tmp_path / "bad.json"
    plain, panel = json.loads(file.read_text()), fresh()
    before = state(panel)
    texts = ["", "{", "[]", "null", "\x80", file.read_text()[:-40], "[" * 10**5]
    texts += [_changed(plain, *wrong) for wrong in WRONG]
    for text in texts:
        bad.write_bytes(text.encode("latin-1", "replace"))
        message = told(panel, bad, "open")
        assert 'role="alert"' in message, text[:200]
        assert state(panel) == before, text[:200]
    assert "there is no session" in told(panel, tmp_path / "none.json", "open")
    for part, value, message in SAID:
        bad.write_text(_changed(plain, part, value))
        assert message in told(panel, bad, "open")
    assert panel.files.undo_button.layout.display == "none"
    assert "Opened" in told(panel, file, "open")
    assert state(panel) != before


def test_a_point_of_no_selection_has_no_setting(saved, fresh, tmp_path):
    """A file that an editor changed is opened; such a point is of no curve."""
    plain, file = json.loads(saved[1].read_text()), tmp_path / "s.json"
    for point in plain["points"]:
        point["selection"] = None
    file.write_text(json.dumps(plain))
    panel = fresh()
    assert "Opened" in told(panel, file, "open")
    assert len(panel.session.points) == len(plain["points"])
    assert panel.session.measured().empty


def test_only_a_session_is_replaced(tmp_path):
    """A notebook of the same name is not; and nothing is left beside it."""
    panel, file = explore(small_table()), tmp_path / "s.json"
    file.write_text('{"cells": []}')
    assert "is no session of the panel" in told(panel, file)
    assert file.read_text() == '{"cells": []}'
    file.unlink()
    plain = save(panel, file)
    file.write_text(json.dumps(plain | {"version": VERSION - 1}))
    assert "Invalid enum value" in told(panel, file)
    assert json.loads(file.read_text())["version"] == VERSION - 1
    file.write_text(json.dumps(plain))
    panel.controls.ratio.value = "0.5"
    assert save(panel, file)["selection"]["ratio"] == 0.5
    panel.controls.ratio.value = "half"
    assert "infeasible" in told(panel, file)
    assert json.loads(file.read_text())["selection"]["ratio"] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_a_fraction_is_not_rounded_in_silence(tmp_path):
    """1/3 has no decimal, so it is not saved as another ratio."""
    panel = explore(small_table())
    panel.session.choose(Selection(Fraction(1, 3)))
    assert "a file would change" in told(panel, tmp_path / "s.json")
    assert list(tmp_path.iterdir()) == []


def test_tables_without_a_record_differ_by_names_and_numbers():
    """One changed number is another table, as is a column of another name."""
    table = random_table(2, 2, 4)
    frame = table.frame
    for other in (
        frame.assign(sum_h2=frame["sum_h2"] + 1e-9),
        frame.rename(columns={"sum_ph2": "sum_hg2"}),
    ):
        changed = ImportanceTable.from_frame(other, **table.metadata)
        assert fingerprint_of(changed) != fingerprint_of(table)


def test_an_edited_table_is_another(fresh, tmp_path):
    """Though it says that it was measured; a file of before had only what it says."""
    panel, file = fresh(), tmp_path / "s.json"
    plain, table = save(panel, file), panel.session.table
    frame = table.frame.assign(sum_h2=1.0)
    edited = explore(ImportanceTable(frame, table.metadata))
    assert "of another model, calibration or table" in told(edited, file, "open")
    file.write_text(json.dumps(plain | {"table": table.metadata["spec_hash"]}))
    assert "did not record the numbers" in told(edited, file, "open")
    assert "Opened" in told(fresh(), file, "open")


# --- a session alone --------------------------------------------------------------


def test_session_without_architecture():
    """A bare table still selects; of parameters nothing is known."""
    table = ImportanceTable.from_frame(small_table().frame)
    session = PruningSession(table)
    assert session.savings() is None
    assert "4 of 16" not in session.describe()
    assert "12 of 16 kept" in session.describe()
    assert [answer.of for answer in answers(session)[:2]] == ["not in the table"] * 2


def test_session_without_a_model_cannot_evaluate():
    """Evaluating a table alone is an error that says what to do."""
    with pytest.raises(SpecError, match="open_workbench"):
        PruningSession(small_table()).evaluate(("pydocs",))
