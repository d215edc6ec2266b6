"""What leaves the panel: saved selections compared, and the pruned model."""

from pathlib import Path

from pressing import failed, press

from heapr_lab.checkpoints.provenance import read_provenance
from heapr_lab.errors import CorpusError
from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.storage.files import read_frame


def labels_of(tab: CompareTab) -> list[str]:
    """What the pins are called, in their order."""
    return [pin.label for pin in tab.pins]


def test_pins_are_compared_and_exported(panel, tmp_path, monkeypatch):
    """Two choices, one evaluated: chart, table, and files that say where from."""
    monkeypatch.chdir(tmp_path)
    tab = panel.comparison
    assert tab.export_button.disabled
    panel.controls.ratio.value = "0.25"
    tab.pin_button.click()
    panel.controls.ratio.value = "0.5"
    panel.controls.structure.value = "uniform"
    tab.pin_button.click()
    press(panel.evaluation.job)
    assert labels_of(tab) == ["A", "B"]
    frame = tab.frame()
    assert frame["achieved_ratio"].tolist() == [0.25, 0.5]
    (loss,) = [name for name in frame if name.startswith("Δloss ")]
    assert frame[loss].notna().tolist() == [False, True]
    assert "2 pinned." in tab.message.value
    assert bytes(tab.chart.value).startswith(b"\x89PNG")
    tab.export_button.click()
    assert "Written to comparison" in tab.exported.value
    tab.label.value = "B"
    tab.pin_button.click()  # the same again: what was written may be another
    assert "Written to" not in tab.exported.value
    check_files(tmp_path / "comparison", panel.session.table.metadata["spec_hash"])
    (tmp_path / "file").touch()
    taken = {"comparison": "has a comparison already", " ": "no name", "file": "exists"}
    taken["~nosuch/comparison"] = "is in the home of an unknown user"
    for name, why in taken.items():
        tab.folder.value = name
        tab.export_button.click()
        assert why in tab.exported.value


def check_files(folder: Path, importance: str) -> None:
    """All kinds of files are there, and say of which pins and table they are."""
    written = {path.suffix for path in folder.iterdir()}
    assert written == {".png", ".pdf", ".csv", ".md", ".parquet"}
    stored, metadata = read_frame(folder / "comparison.parquet")
    assert stored["label"].tolist() == ["A", "B"]
    assert [pin["ratio"] for pin in metadata["pins"]] == [0.25, 0.5]
    assert metadata["importance"] == importance
    for suffix in (".png", ".parquet"):
        origin = read_provenance(folder / f"comparison{suffix}")
        assert origin["importance"] == importance
        assert [pin["label"] for pin in origin["pins"]] == ["A", "B"]


def test_pins_are_chosen_and_removed(panel):
    """One or all, which *Undo* brings back; the first is chosen without being asked."""
    tab = panel.comparison
    tab.pin()
    panel.controls.structure.value = "uniform"
    tab.pin()
    tab.load_button.click()
    assert panel.session.selection == tab.pins[0].selection
    assert panel.controls.structure.value == "ragged"
    tab.remove_button.click()
    assert labels_of(tab) == ["B"]
    tab.undo_button.click()
    assert labels_of(tab) == ["A", "B"]
    tab.clear_button.click()
    assert tab.pins == []
    assert tab.export_button.disabled
    # Undo takes nothing that came since; what has the same label changes places.
    panel.controls.ratio.value = "0.5"
    tab.label.value = "C"
    tab.pin()
    tab.undo()
    assert labels_of(tab) == ["A", "B", "C"]
    assert tab.undo_button.disabled
    tab.label.value = "A"
    tab.pin()
    for ratio in (0.25, 0.5):
        tab.undo()
        ratios = {pin.label: pin.selection.ratio for pin in tab.pins}
        assert ratios == {"A": ratio, "B": 0.25, "C": 0.5}


def test_a_label_that_is_no_formula(panel, tmp_path, monkeypatch):
    """Matplotlib would fail at it; the chart and the files have it as it is."""
    monkeypatch.chdir(tmp_path)
    tab, label = panel.comparison, "$x^^2$"
    tab.label.value = label
    tab.pin_button.click()
    assert labels_of(tab) == [label]
    assert bytes(tab.chart.value).startswith(b"\x89PNG")
    figure = tab.figure(tab.frame())
    assert [text.get_text() for text in figure.legends[0].texts] == [r"\$x^^2\$"]
    tab.export_button.click()
    assert "Written to comparison" in tab.exported.value


def test_unchanged_weights_need_no_text(panel, tmp_path, monkeypatch):
    """A table from elsewhere can be exported where its corpus is not."""

    def missing(*_args: object, **_named: object) -> None:
        raise CorpusError("the corpus is not here")

    monkeypatch.setattr(panel.session.workbench, "calibration_set", missing)
    tab, panel.weights.weights.value = panel.export, "unchanged"
    tab.folder.value = str(tmp_path / "pruned")
    press(tab.job)
    tab.folder.value, tab.heal.value = str(tmp_path / "other"), 32
    assert "the corpus is not here" in failed(tab.job)
