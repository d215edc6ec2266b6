"""What the command line refuses: in one line, before a model is loaded."""

import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from commands import invoke, one_line, run
from processes import says
from tiny_folder import write_model
from typer.main import get_command

from heapr_lab.cli.app import app
from heapr_lab.pruning.masks import KeepMask

# --- places -----------------------------------------------------------------------


def test_a_link_stays_and_its_target_is_written(folder, tmp_path):
    """The link may point to nothing."""
    link, target = tmp_path / "link.parquet", tmp_path / "far" / "mask.parquet"
    target.parent.mkdir()
    link.symlink_to(target)
    chosen = ("--importance", folder / "table.parquet", "--ratio", 0.3)
    run("prune", folder / "moe", *chosen, "--out", link)
    assert link.is_symlink()
    assert KeepMask.read(target).n_removed == 19
    assert [path.name for path in target.parent.iterdir()] == ["mask.parquet"]


# --- devices, types and numbers ---------------------------------------------------


@pytest.mark.parametrize(
    ("command", "device"),
    [
        *(("score", device) for device in ("cuda:99", "nonsense", "", "meta")),
        *((command, "CPU") for command in ("evaluate", "reproduce", "app")),
    ],
)
def test_a_device_that_is_not_there(folder, command, device, monkeypatch):
    """The message comes before weights are read, and names the devices there are."""
    monkeypatch.setattr("heapr_lab.models.loading.read_weights", None)
    model = ("--model",) if command == "reproduce" else ()
    text = {"score": "--corpus", "evaluate": "--corpora"}
    corpus = (text[command], folder / "text.txt") if command in text else ()
    message = one_line(command, *model, folder / "moe", "--device", device, *corpus)
    assert f"device is {device!r}" in message
    assert "give one of auto, cpu" in message


def test_a_window_longer_than_any_text(folder):
    """The length is more than any integer of torch's holds."""
    text = ("--corpus", folder / "text.txt", "--profile", "small", "--seq-len", 2**70)
    assert "has 0 windows" in one_line("score", folder / "moe", *text)


# --- names ------------------------------------------------------------------------


def test_the_options_of_prune_stand_in_groups():
    """There are at most twenty, each below the name of its group."""
    text = run("prune", "--help")
    groups = ["How much", "Method", "Shape", "Text", "Machine", "Output"]
    places = [text.index(f"\n{name}:\n") for name in groups]
    assert places == sorted(places)
    options = re.findall(r"^  (--[a-z-]+)", text[: text.index("\nOptions:\n")], re.M)
    assert len(options) <= 20
    assert text.index("--ratio SHARE") < places[1] < text.index("--method ")


# --- before torch is imported -------------------------------------------------------

REFUSED = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path):
    """All in one process, which has neither torch nor transformers after the first.

    In one line, unless it is the parser that says it; no file is made or changed.
    """
    (tmp_path / "file").write_text("a file")
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.iterdir())
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from heapr_lab.cli.app import app\n"
        "heavy = {'torch', 'transformers', 'datasets', 'lm_eval'}\n"
        "first, later = json.loads(sys.argv[1])\n"
        "for words, part in first + later:\n"
        "    done = CliRunner().invoke(app, words)\n"
        "    case = (words, done.stderr, done.exception)\n"
        "    assert done.exit_code == 2, case\n"
        "    assert part in done.stderr, case\n"
        "    ours = done.stderr.startswith('heapr-lab: ')\n"
        "    assert done.stderr.count('\\n') == 1 or not ours, case\n"
        "    assert [words, part] in later or not heavy & sys.modules.keys(), case\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "HEAPR_TASKS_DIR"}
    cases = [
        [
            (shlex.split(line.replace("LONG", "x" * 240)), part)
            for line, part in REFUSED[when].items()
        ]
        for when in ("first", "later")
    ]
    says("-c", code, json.dumps(cases), cwd=tmp_path, env=env)
    assert sorted(tmp_path.iterdir()) == before


# --- words ------------------------------------------------------------------------


def test_the_version():
    """The version is that of the distribution."""
    assert re.fullmatch(r"heapr-lab \d+\.\d+.*\n", run("--version"))


def test_help_has_no_docstring_sections():
    """`Raises:` is for those who read the code; `--help` for those who run it."""
    for command in get_command(app).commands:  # type: ignore[attr-defined]
        assert "Raises" not in run(command, "--help"), command


def test_a_checkpoint_without_tokenizer_says_so(folder, tmp_path):
    """The note is on standard error; the checkpoint cannot be evaluated as it is."""
    bare = write_model(tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    chosen = ("--importance", folder / "table.parquet", "--ratio", 0.3)
    for source, warned in ((bare, True), (folder / "moe", False)):
        out = tmp_path / f"pruned-{source.name}"
        result = invoke("prune", source, *chosen, "--out", out)
        assert result.exit_code == 0
        assert (f"there is no tokenizer in {source}, and" in result.stderr) == warned
