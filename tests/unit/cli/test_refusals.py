"""What the command line refuses: in one line, before a model is loaded."""

import json
import os
import re
from pathlib import Path

import pytest
from commands import invoke, one_line, run
from processes import says
from tiny_folder import write_model

from heapr_lab.cli.app import app
from heapr_lab.pruning.masks import KeepMask

COMMANDS = [command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]


# --- places -----------------------------------------------------------------------


def test_a_link_stays_and_its_target_is_written(folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "", "meta", "é", "CPU"])
@pytest.mark.parametrize("command", ["score", "evaluate", "reproduce", "app"])
def test_a_device_that_is_not_there(
    folder: Path, command: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message comes before weights are read, and names the devices there are."""
    monkeypatch.setattr("heapr_lab.models.loading.read_weights", None)
    model = ("--model",) if command == "reproduce" else ()
    text = {"score": "--corpus", "evaluate": "--corpora"}
    corpus = (text[command], folder / "text.txt") if command in text else ()
    message = one_line(command, *model, folder / "moe", "--device", device, *corpus)
    assert f"device is {device!r}" in message
    assert "give one of auto, cpu" in message


def test_a_window_longer_than_any_text(folder: Path) -> None:
    """The length is more than any integer of torch's holds."""
    text = ("--corpus", folder / "text.txt", "--profile", "small", "--seq-len", 2**70)
    assert "has 0 windows" in one_line("score", folder / "moe", *text)


# --- names ------------------------------------------------------------------------


def test_the_options_of_prune_stand_in_groups() -> None:
    """There are at most twenty, each below the name of its group."""
    text = run("prune", "--help")
    groups = ["How much", "Method", "Shape", "Text", "Machine", "Output"]
    places = [text.index(f"\n{name}:\n") for name in groups]
    assert places == sorted(places)
    options = re.findall(r"^  (--[a-z-]+)", text[: text.index("\nOptions:\n")], re.M)
    assert len(options) <= 20
    assert text.index("--ratio SHARE") < places[1] < text.index("--method ")


# --- before torch is imported -------------------------------------------------------

RATIO = ("prune", "lab", "--ratio", "0.25")
WIDE = (*RATIO, "--structure", "uniform", "--multiple", "256")
TABLE = ("prune", "lab", "--importance", "bad.parquet")
SCORE = ("score", "lab")
LONG = "x" * 240
WRONG: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prune", "lab", "--ratio", "25"), "write 0.25 or 25% if you mean that"),
    (("prune", "lab", "--ratio", "much"), "much"),
    ((*RATIO, "--method", "magic"), "method must be one of 'best', 'paper', "),
    ((*RATIO, "--structure", "round"), "round"),
    ((*RATIO, "--of", "bytes"), "bytes"),
    ((*RATIO, "--estimator", "guess"), "guess"),
    ((*RATIO, "--for", "abacus"), "abacus"),
    (("score", "lab", "--seed", str(2**63)), "seed"),
    ((*RATIO, "--profile", "huge"), "huge"),
    ((*RATIO, "--dtype", "int8"), "int8"),
    ((*RATIO, "--nonsense"), "--nonsense"),
    (
        (*RATIO, "--structure", "aligned", "--multiple", str(2**70)),
        "from 1 to 2147483647",
    ),
    ((*RATIO, "--importance", "none.parquet"), "none.parquet"),
    (("prune", "./nosuchfolder", "--ratio", "0.25"), "no such folder: "),
    (("prune", "no/such-model", "--ratio", "0.25"), "no/such-model"),
    ((*SCORE, "--out", "table.csv"), "a .parquet file"),
    ((*SCORE, "--out", ""), "a .parquet file"),
    ((*SCORE, "--out", "file/x.parquet"), "Not a directory"),
    ((*SCORE, "--out", "loop/x.parquet"), "symbolic links"),
    ((*SCORE, "--out", f"{LONG}.parquet"), "expected at most"),
    ((*SCORE, "--corpus", "typo"), "corpus 'typo' is unknown"),
    ((*SCORE, "--corpus", "0.5*pydocs + 0.5*typo"), "corpus 'typo' is unknown"),
    ((*SCORE, "--corpus", "0.5*pydocs + typo"), "cannot read the mixture"),
    ((*SCORE, "--corpus", "absent.txt"), "does not exist"),
    ((*SCORE, "--corpus", "pydocs:no_such_package"), "not installed"),
    ((*SCORE, "--dtype", ""), "'float16', 'float64', got ''"),
    ((*SCORE, "--seed", str(-(2**63) - 1)), "seed must be a whole number from -"),
    (("score", "lab", "--n-sequences", "0"), "--n-sequences"),
    (("evaluate", "lab", "--corpora", ""), "nothing to measure"),
    (("evaluate", "lab", "--corpora", "absent.txt"), "absent.txt"),
    (("evaluate", "lab", "--corpora", "", "--tasks", "continuation:typo"), "typo"),
    (("evaluate", "lab", "--tasks", "arc_esy"), "knows no task arc_esy"),
    (("evaluate", "lab", "--tasks", "nope"), "knows no task nope"),
    (("evaluate", "lab", "--mask", "none.parquet"), "none.parquet"),
    (("evaluate", "lab", "--mask", "bad.parquet"), "bad.parquet cannot be read"),
    (("evaluate", "lab", "--kl"), "--mask"),
    (("compare",), "give MODEL, or --list"),
    (("compare", "lab", "--ratios", "0.2,many"), "many"),
    (("compare", "lab", "--ratios", "25"), "write 0.25 or 25%"),
    (("compare", "lab", "--set", "alpha=1"), "expected METHOD.OPTION=VALUE"),
    (("compare", "lab", "--set", "heapr.x=1"), "'heapr' has no option x; it has none"),
    (("compare", "lab", "--set", "reap.alpha=1"), "no option alpha"),
    (("compare", "lab", "--set", "camera-p.alpha=high"), "is 'high', expected float"),
    (("compare", "lab", "--set", "naee.most_tokens=0"), "expected int from 1"),
    (("compare", "lab", "--set", "magic.x=1"), "unknown method 'magic'"),
    (("compare", "lab", "--tasks", "continuation:gone"), "gone"),
    (("compare", "lab", "--tasks", "arc_esy"), "knows no task arc_esy"),
    (("compare", "lab", "--methods", ""), "nothing to measure"),
    (("compare", "lab", "--corpora", ""), "nothing to measure"),
    (("compare", "lab", "--preset", "table2"), "expected paper-table1"),
    (("prune", "lab"), "Missing option '--ratio'"),
    ((*TABLE, "--ratio", "0.4"), "bad.parquet cannot be read"),
    ((*TABLE, "--ratio", "0.4", "--own-text", "1"), "runs the model"),
    (("plan", "lab", "--memory", "24 bananas"), "or a number with a unit"),
    (("plan", "./nosuchfolder"), "no such folder: "),
    (("score", "."), "has no config.json: expected "),
    (("score", "as-moe:bad"), "cannot be read as JSON"),
    (("reproduce", "--out", "figures.png"), "figures.png"),
    (("reproduce", "--out", "file/figures"), "give"),
    (("reproduce", "--out", ""), "has no name: give the name"),
    (("score", "lab", "--host-memory", "24 bananas"), "16GB"),
    (("reproduce", "--profile", "huge"), "huge"),
    ((*RATIO, "--out", "mask.csv"), "named like a file: give a name without a suffix"),
    ((*RATIO, "--out", "MASK.PARQUET"), "named like a file"),
    ((*RATIO, "--out", ".parquet"), "named like a file"),
    ((*RATIO, "--out", "loop"), "is not a folder"),
    ((*RATIO, "--out", "file/pruned"), "Not a directory"),
    ((*RATIO, "--out", "file/mask.parquet"), "Not a directory"),
    ((*RATIO, "--out", LONG), "expected at most"),
    ((*RATIO, "--corpus", "typo"), "corpus 'typo' is unknown"),
    ((*RATIO, "--heal", "16"), "give the folder of a checkpoint as --out"),
    ((*RATIO, "--heal", "16", "--out", "mask.parquet"), "a checkpoint as --out"),
    ((*TABLE, "--ratio", "0.4", "--heal", "16", "--out", "x"), "leave --importance"),
    (("compare", "lab", "--methods", "naeee", "--ratios", "20%"), "unknown method"),
    (("score", "lab", "--device", "gpu"), "give one of auto, cpu"),
    (("app", "none.parquet"), "no table none.parquet; make one"),
    (("app", "bad.parquet"), "bad.parquet cannot be read"),
    (("app", "./nosuchfolder"), "no such folder: "),
    (("app", "."), "has no config.json"),
    (("app", "bad/"), "cannot be read as JSON"),
    (("app", "as-moe:bad"), "cannot be read as JSON"),
    (("app", "lab", "--profile", "huge"), "profile must be one of "),
)
"""What is asked for, and a part of what is said of it."""
LATER: tuple[tuple[tuple[str, ...], str], ...] = (
    (WIDE, "experts have 96 atoms: give a smaller multiple"),
    ((*WIDE, "--out", "x"), "experts have 96 atoms: give a smaller multiple"),
    (
        ("evaluate", "lab", "--corpora", "", "--tasks", "arc_easy"),
        "the items of task 'arc_easy' are not available",
    ),
)
"""What is refused before a model is opened, but not before torch is imported."""


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path: Path) -> None:
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
    says("-c", code, json.dumps([WRONG, LATER]), cwd=tmp_path, env=env)
    assert sorted(tmp_path.iterdir()) == before


# --- words ------------------------------------------------------------------------


def test_the_version() -> None:
    """The version is that of the distribution."""
    assert re.fullmatch(r"heapr-lab \d+\.\d+.*\n", run("--version"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_docstring_sections(command: str) -> None:
    """`Raises:` is for those who read the code; `--help` for those who run it."""
    name = {"panel": "app"}.get(command, command.replace("_", "-"))
    assert "Raises" not in run(name, "--help")


def test_a_checkpoint_without_tokenizer_says_so(folder: Path, tmp_path: Path) -> None:
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
