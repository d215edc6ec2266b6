"""What the command line refuses: in one line, before a model is loaded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import TINY, invoke, one_line, refused, run, text_of
from tiny_folder import write_model

from heapr_lab.cli.app import app
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.storage import paths

COMMANDS = [command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model fails, not with an error that would be one line."""
    model = "workbench.workbench.open_workbench"
    table = "checkpoints.same_model.own_table"
    for name in (model, table):
        monkeypatch.setattr(f"heapr_lab.{name}", lambda *_args, **_options: 1 / 0)


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A file, a link to itself, and nothing else."""
    (tmp_path / "file").write_text("a file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


# --- places -----------------------------------------------------------------------


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("file/x.parquet", "Not a directory"),
        ("loop/x.parquet", "symbolic links"),
        ("x" * 240 + ".parquet", "expected at most"),
        ("", "a .parquet file"),
        ("table", "a .parquet file"),
        ("table.csv", "a .parquet file"),
    ],
)
def test_a_table_that_cannot_be_written(
    folder: Path, places: Path, out: str, said: str
) -> None:
    """`score --out` is tried before anything is measured; nothing is left there."""
    path = places / out if out else ""
    before = sorted(places.iterdir())
    message = one_line("score", folder / "moe", "--out", path, *text_of(folder))
    assert said in message
    assert "give" in message
    assert sorted(places.iterdir()) == before


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("mask.csv", "named like a file: give a name without a suffix, or one that"),
        ("model.safetensors", "named like a file"),
        ("MASK.PARQUET", "named like a file"),
        (".parquet", "named like a file"),
        ("file", "is not a folder"),
        ("loop", "is not a folder"),
        ("file/pruned", "Not a directory"),
        ("file/mask.parquet", "Not a directory"),
        ("x" * 240, "expected at most"),
    ],
)
def test_a_mask_or_checkpoint_that_cannot_be_written(
    folder: Path, places: Path, out: str, said: str
) -> None:
    """`prune --out` is tried before the table is read, let alone the model."""
    before = sorted(places.iterdir())
    chosen = ("--importance", folder / "table.parquet", "--ratio", 0.3)
    assert said in one_line("prune", folder / "moe", *chosen, "--out", places / out)
    assert sorted(places.iterdir()) == before


def test_figures_that_cannot_be_written(places: Path) -> None:
    """Neither into a file, nor into a folder that is named like one."""
    for out in ("file", "figures.png", "file/figures"):
        assert "give" in one_line("reproduce", "--out", places / out)
    assert "has no name: give the name" in one_line("reproduce", "--out", "")


def test_training_that_cannot_be_written(places: Path) -> None:
    """Neither the model nor the state of its run."""
    for option in ("--out", "--work"):
        assert "give" in one_line("train-lab-model", option, places / "file")


def test_a_link_stays_and_its_target_is_written(folder: Path, tmp_path: Path) -> None:
    """Also where it points to nothing."""
    link, target = tmp_path / "link.parquet", tmp_path / "far" / "mask.parquet"
    target.parent.mkdir()
    link.symlink_to(target)
    chosen = ("--importance", folder / "table.parquet", "--ratio", 0.3)
    run("prune", folder / "moe", *chosen, "--out", link)
    assert link.is_symlink()
    assert KeepMask.read(target).n_removed == 19
    assert [path.name for path in target.parent.iterdir()] == ["mask.parquet"]


def test_files_are_readable_as_the_umask_says(folder: Path, tmp_path: Path) -> None:
    """Masks, the table that `score` wrote, and the tokens that it kept."""
    out = tmp_path / "mask.parquet"
    chosen = ("--importance", folder / "table.parquet", "--ratio", 0.3)
    run("prune", folder / "moe", *chosen, "--out", out)
    umask = os.umask(0o022)
    os.umask(umask)
    kept = list((paths.cache_dir() / "tokens").glob("*.safetensors"))
    assert kept
    for path in (out, folder / "table.parquet", *kept):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


# --- devices, types and numbers ---------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "", "meta", "é", "CPU"])
@pytest.mark.parametrize("command", ["score", "evaluate", "reproduce", "app"])
def test_a_device_that_is_not_there(
    folder: Path, command: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the weights are read, with those that are there."""
    monkeypatch.setattr("heapr_lab.models.loading.read_weights", None)
    model = ("--model",) if command == "reproduce" else ()
    text = {"score": "--corpus", "evaluate": "--corpora"}
    given = (text[command], folder / "text.txt") if command in text else ()
    message = one_line(command, *model, folder / "moe", "--device", device, *given)
    assert f"device is {device!r}" in message
    assert "give one of auto, cpu" in message


def test_training_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Before any corpus is read."""
    where = ("--work", tmp_path / "w", "--out", tmp_path / "o")
    assert "give one of" in one_line("train-lab-model", "--device", "cuda:99", *where)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "", "float4_e2m1fn_x2"])
def test_a_type_without_kernels(folder: Path, dtype: str) -> None:
    """The message has the types there are."""
    asked = ("score", folder / "moe", "--dtype", dtype, *text_of(folder))
    assert f"dtype is {dtype!r}, expected 'auto', 'float32'" in one_line(*asked)
    page = ("app", folder / "moe", "--no-browser", "--dtype", dtype)
    assert f"dtype is {dtype!r}, expected 'auto', 'float32'" in one_line(*page)


def test_float64_scores_prunes_and_evaluates(folder: Path, tmp_path: Path) -> None:
    """The grouped kernels know no float64; the numbers are those of float32."""
    asked = (folder / "moe", *text_of(folder), "--dtype", "float64", "--ratio", 0.4)
    run("prune", *asked, "--out", tmp_path / "pruned")
    text = ("--corpora", folder / "text.txt", *TINY)
    for model in (folder / "moe", tmp_path / "pruned"):
        wide, narrow = (
            float(run("evaluate", model, *text, "--dtype", dtype).split()[2])
            for dtype in ("float64", "float32")
        )
        assert wide == pytest.approx(narrow, rel=1e-4)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**70])
def test_a_seed_of_more_than_64_bits(folder: Path, seed: int) -> None:
    """Refused before anything is drawn."""
    more = ("--seed", seed, *text_of(folder))
    assert f"seed is {seed}" in one_line("score", folder / "moe", *more)


def test_a_window_longer_than_any_text(folder: Path) -> None:
    """By more than any integer of torch's holds."""
    text = ("--corpus", folder / "text.txt", "--profile", "small", "--seq-len", 2**70)
    assert "has 0 windows" in one_line("score", folder / "moe", *text)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("structure", ["aligned", "per_layer", "uniform"])
def test_a_multiple_beyond_any_expert(folder: Path, structure: str) -> None:
    """More than any integer of NumPy's holds."""
    chosen = ("--ratio", 0.3, "--structure", structure, "--multiple", 2**70)
    assert "no expert has so many atoms" in one_line("prune", folder / "moe", *chosen)


# --- names ------------------------------------------------------------------------


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ("typo", "corpus 'typo' is unknown"),
        ("", "corpus '' is unknown"),
        ("0.5*pydocs + 0.5*typo", "corpus 'typo' is unknown"),
        ("0.5*pydocs + typo", "cannot read the mixture"),
        ("9" * 400 + "*pydocs", "one that is too large"),
        ("absent.txt", "does not exist"),
        ("pydocs:no_such_package", "not installed"),
    ],
)
def test_a_corpus_that_is_not_there(folder: Path, corpus: str, said: str) -> None:
    """To score, to prune and to evaluate on, and to continue."""
    model, profile = folder / "moe", ("--profile", "small")
    assert said in one_line("score", model, "--corpus", corpus, *profile)
    chosen = ("--ratio", 0.3, "--corpus", corpus)
    assert said in one_line("prune", model, *chosen, *profile)
    if corpus and "*" not in corpus:
        assert said in one_line("evaluate", model, "--corpora", corpus, *profile)
        task = ("--corpora", "", "--tasks", f"continuation:{corpus}")
        assert said in one_line("evaluate", model, *task, *profile)


@pytest.mark.usefixtures("unloaded")
def test_a_mask_that_is_damaged(folder: Path, tmp_path: Path) -> None:
    """Nor is any text read for it."""
    mask = tmp_path / "mask.parquet"
    mask.write_bytes(b"no parquet")
    asked = ("evaluate", folder / "moe", "--mask", mask)
    assert "mask.parquet cannot be read" in one_line(*asked)


@pytest.mark.usefixtures("unloaded")
def test_a_task_that_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items lie nowhere, and there is no hub."""
    monkeypatch.delenv("HEAPR_TASKS_DIR", raising=False)
    asked = ("evaluate", folder / "moe", "--corpora", "", "--tasks", "arc_easy")
    assert "the items of task 'arc_easy' are not available" in one_line(*asked)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("more", [(), ("--tasks", ","), ("--mask", "TABLE")])
def test_nothing_to_measure(folder: Path, more: tuple[str, ...]) -> None:
    """No corpus and no task: there would be no output."""
    given = [
        str(folder / "table.parquet") if part == "TABLE" else part for part in more
    ]
    message = one_line("evaluate", folder / "moe", "--corpora", "", *given)
    assert "nothing to measure: give --corpora" in message


WITHDRAWN = (
    "bias", "distill", "exclude-layers", "granularity", "host-memory",
    "min-atoms", "perplexity", "protect-unrouted", "scope", "seed",
)  # fmt: skip
"""Options that `prune` had once."""


@pytest.mark.parametrize("name", WITHDRAWN)
def test_an_option_that_was_withdrawn(name: str) -> None:
    """The parser names it, and nothing is pruned without it."""
    message = refused("prune", "lab", "--ratio", 0.25, f"--{name}", 1)
    assert f"No such option: --{name}" in message


def test_the_options_of_prune_stand_in_groups() -> None:
    """At most twenty, each below the name of its group."""
    text = run("prune", "--help")
    groups = ["How much", "Method", "Shape", "Text", "Machine", "Output"]
    places = [text.index(f"\n{name}:\n") for name in groups]
    assert places == sorted(places)
    options = re.findall(r"^  (--[a-z-]+)", text[: text.index("\nOptions:\n")], re.M)
    assert len(options) <= 20
    assert text.index("--ratio SHARE") < places[1] < text.index("--method ")


# --- before torch is imported -------------------------------------------------------

RATIO = ("prune", "lab", "--ratio", "0.25")
TRAIN = ("train-lab-model", "--work", "work")
WRONG: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prune", "lab", "--ratio", "25"), "write 0.25 or 25% if you mean that"),
    (("prune", "lab", "--ratio", "much"), "much"),
    (("prune", "lab"), "--ratio"),
    ((*RATIO, "--method", "magic"), "expected one of best, paper"),
    ((*RATIO, "--structure", "round"), "round"),
    ((*RATIO, "--of", "bytes"), "bytes"),
    ((*RATIO, "--estimator", "guess"), "guess"),
    ((*RATIO, "--for", "abacus"), "abacus"),
    (("score", "lab", "--seed", str(2**63)), "seed"),
    ((*RATIO, "--profile", "huge"), "huge"),
    ((*RATIO, "--dtype", "int8"), "int8"),
    ((*RATIO, "--nonsense"), "--nonsense"),
    ((*RATIO, "--importance", "none.parquet"), "none.parquet"),
    (("prune", "./nosuchfolder", "--ratio", "0.25"), "no such folder: "),
    (("prune", "no/such-model", "--ratio", "0.25"), "no/such-model"),
    (("score", "./nosuchfolder"), "heapr-lab: no such folder: "),
    (("score", "lab", "--out", "table.csv"), "table.csv"),
    (("score", "lab", "--corpus", "typo"), "typo"),
    (("score", "lab", "--corpus", "0.5*pydocs + typo"), "typo"),
    (("score", "lab", "--n-sequences", "0"), "--n-sequences"),
    (("evaluate", "lab", "--corpora", ""), "nothing to measure"),
    (("evaluate", "lab", "--corpora", "absent.txt"), "absent.txt"),
    (("evaluate", "lab", "--corpora", "", "--tasks", "continuation:typo"), "typo"),
    (("evaluate", "lab", "--mask", "none.parquet"), "none.parquet"),
    (("evaluate", "lab", "--kl"), "--mask"),
    (("compare",), "give MODEL, or --list"),
    (("compare", "lab", "--ratios", "0.2,many"), "many"),
    (("compare", "lab", "--ratios", "25"), "25"),
    (("compare", "lab", "--set", "reap"), "reap"),
    (("reproduce", "--out", "figures.png"), "figures.png"),
    (("score", "lab", "--host-memory", "24 bananas"), "16GB"),
    (("reproduce", "--profile", "huge"), "huge"),
    (("train-lab-model", "--recipe", "magic"), "magic"),
    (("train-lab-model", "--recipe", "smolmoe", "--steps", "5"), "neither --steps"),
    ((*TRAIN, "--steps", "0"), "--steps"),
    ((*TRAIN, "--start-from", "."), "--steps"),
    (("app", "none.parquet"), "none.parquet"),
    (("app", "./nosuchfolder"), "nosuchfolder"),
)
"""What is asked for, and a part of what is said of it."""


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    """All of these in one process, which has neither torch nor transformers after."""
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from heapr_lab.cli.app import app\n"
        "heavy = {'torch', 'transformers', 'datasets', 'lm_eval'}\n"
        "for words, part in json.loads(sys.argv[1]):\n"
        "    found = CliRunner().invoke(app, words)\n"
        "    said = (words, found.stderr, found.exception)\n"
        "    assert found.exit_code == 2, said\n"
        "    assert part in found.stderr, said\n"
        "    assert not heavy & sys.modules.keys(), said\n"
    )
    asked = [sys.executable, "-c", code, json.dumps(WRONG)]
    made = subprocess.run(
        asked, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert list(tmp_path.iterdir()) == []


# --- words ------------------------------------------------------------------------


def test_the_version() -> None:
    """That of the distribution."""
    assert re.fullmatch(r"heapr-lab \d+\.\d+.*\n", run("--version"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_docstring_sections(command: str) -> None:
    """`Raises:` is for those who read the code; `--help` for those who run it."""
    name = {"panel": "app"}.get(command, command.replace("_", "-"))
    assert "Raises" not in run(name, "--help")


def test_help_says_what_a_ratio_can_count() -> None:
    """Each value beside the words that the panel has for it."""
    text = " ".join(run("prune", "--help").split())
    for said in ("parameters of the whole model (model)", "(atoms)"):
        assert said in text


def test_a_checkpoint_without_tokenizer_says_so(folder: Path, tmp_path: Path) -> None:
    """On standard error; it could not be evaluated as it is."""
    bare = write_model(tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    chosen = ("--importance", folder / "table.parquet", "--ratio", 0.3)
    for source, said in ((bare, True), (folder / "moe", False)):
        out = tmp_path / f"pruned-{source.name}"
        result = invoke("prune", source, *chosen, "--out", out)
        assert result.exit_code == 0
        assert (f"there is no tokenizer in {source}, and" in result.stderr) == said
