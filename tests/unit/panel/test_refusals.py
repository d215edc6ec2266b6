"""What the panel refuses: in one line, before a model is loaded."""

import json
from typing import Any

from processes import says

Asked = dict[str, Any]
WRONG: tuple[tuple[str, Asked, str], ...] = (
    ("./nosuch", {}, "no such folder: './nosuch'; expected "),
    ("no/such-model", {}, "cannot get the files of the model 'no/such-model'"),
    (".", {}, "has no config.json: expected "),
    ("bad", {}, "cannot be read as JSON"),
    ("nofile.parquet", {}, "there is no table nofile.parquet; make one with"),
    ("bad.parquet", {}, "bad.parquet cannot be read"),
    ("lab", {"dtype": "x"}, "dtype must be one of 'auto', "),
    ("lab", {"device": "gpu"}, "device is 'gpu': give one of auto, cpu"),
    ("lab", {"stream": "x"}, "stream must be one of True, False, 'auto', got 'x'"),
    ("lab", {"host_memory": "24 bananas"}, "or a number with a unit"),
    ("lab", {"seq_len": 1}, "seq_len must be a whole number from 2, got 1"),
    ("lab", {"profile": "huge"}, "profile must be one of "),
    ("lab", {"corpora": ["nope"]}, "corpus 'nope' is unknown: expected one of "),
    ("lab", {"corpora": ["absent.txt"]}, "corpus file 'absent.txt' does not exist"),
    ("lab", {"tasks": ["nope"]}, "the harness knows no task nope"),
    ("lab", {"tasks": ["continuation:nope"]}, "corpus 'nope' is unknown"),
    ("lab", {"calibration": "nope"}, "corpus 'nope' is unknown"),
    ("lab", {"calibration": "0.5*pydocs + 0.5*nope"}, "corpus 'nope' is unknown"),
    ("lab", {"calibration": "0.5*pydocs + nope"}, "cannot read the mixture"),
    ("lab", {"session": "none.json"}, "there is no session none.json"),
)
"""What is asked for, of which source, and a part of what is said of it."""
EXPLORE = """
import json, sys
from heapr_lab import Calibration, HeaprLabError, explore
for source, asked, part in json.loads(sys.argv[1]):
    if "calibration" in asked:
        asked["calibration"] = Calibration(asked["calibration"])
    case = source, asked
    try:
        explore(source, **asked)
    except HeaprLabError as error:
        (line,) = error._render_traceback_()
        assert part in line, (case, line)
        assert "\\n" not in line, (case, line)
    else:
        raise AssertionError(case)
    assert not {"torch", "transformers", "lm_eval"} & sys.modules.keys(), case
"""


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path):
    """All in one process, which has neither torch nor transformers after the last."""
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    says("-c", EXPLORE, json.dumps(WRONG), cwd=tmp_path)
