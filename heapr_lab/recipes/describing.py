"""What was measured on, in words and as a `Calibration`, from its record. No torch."""

from collections.abc import Mapping
from typing import Any

from heapr_lab.text.calibration_spec import OWN_TEXT, Calibration


def describe_calibration(record: Mapping[str, Any]) -> str:
    """The windows of a `CalibrationSet.record`, or of a table's `calibration`."""
    spec = calibration_of(record)
    if spec is None:
        return "not recorded"
    text = f"{spec.n_sequences} windows of {spec.seq_len} tokens of {spec.corpus}"
    if "split" in record:
        text += f" ({record['split']})"
    text += f", seed {spec.seed}" if "seed" in record else ""
    if spec.own_text:
        n_own = record["n_sequences"] - (spec.n_sequences or 0)
        text += f", and {n_own} that the model wrote itself"
    return text


def calibration_of(record: Mapping[str, Any]) -> Calibration | None:
    """The calibration that draws these windows; None where it is not recorded."""
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
