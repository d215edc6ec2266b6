"""What a table, or what is fitted, was measured on, as it was recorded. No torch."""

from typing import TYPE_CHECKING, Any

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.text.calibration_spec import OWN_TEXT, Calibration

if TYPE_CHECKING:
    from heapr_lab.text.calibration import CalibrationSet


def describe_calibration(
    table: ImportanceTable, windows: "CalibrationSet | None" = None
) -> str:
    """The text that `table`, or what is fitted to `windows`, was measured on."""
    spec = calibration_of(table, windows)
    if spec is None:
        return "not recorded"
    recorded = _recorded(table, windows)
    text = f"{spec.n_sequences} windows of {spec.seq_len} tokens of {spec.corpus}"
    if "split" in recorded:
        text += f" ({recorded['split']})"
    text += f", seed {spec.seed}" if "seed" in recorded else ""
    if spec.own_text:
        n_own = recorded["n_sequences"] - (spec.n_sequences or 0)
        text += f", and {n_own} that the model wrote itself"
    return text


def calibration_of(
    table: ImportanceTable, windows: "CalibrationSet | None" = None
) -> Calibration | None:
    """The calibration of `windows`, or of `table`; None where it is not recorded."""
    record = _recorded(table, windows)
    if not {"n_sequences", "seq_len", "corpus"} <= record.keys():
        return None
    names = ("corpus", "n_sequences", "seq_len", "seed")
    fields = {k: record[k] for k in names if k in record}
    added = {text["corpus"]: text["n_sequences"] for text in record.get("joined", [])}
    if added.keys() - {OWN_TEXT}:
        return None  # windows that no corpus and share describe
    n_own = added.get(OWN_TEXT, 0)
    n = fields["n_sequences"] = record["n_sequences"] - n_own
    return Calibration.from_dict(fields | {"own_text": n_own / n})


def _recorded(
    table: ImportanceTable, windows: "CalibrationSet | None"
) -> dict[str, Any]:
    """What is recorded about the windows, or else about those of the table."""
    if windows is None:
        return (table.metadata.get("provenance") or {}).get("calibration") or {}
    sizes = {"n_sequences": windows.n_sequences, "seq_len": windows.seq_len}
    return windows.provenance | sizes
