"""`smolmoe`: a pretrained dense model carved into experts, and healed.

Layouts are tried at equal healing and judged on validation text; the chosen one is
healed for longer. What is written is the small change of the weights, which
`pretrained.carved` adds to the published ones.
"""

import copy
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab_model.carved_ffn import CarvedFfn, dense_ffns, load_shares
from benchmarks.lab_model.carving import carve
from benchmarks.lab_model.healing import HealSpec, heal
from benchmarks.lab_model.smolmoe_card import write_card
from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.loading import load_model
from heapr_lab.pretrained.carved import NORMS, Carved, Layout, Ternary
from heapr_lab.pretrained.smollm2 import WHEEL, smollm2_folder
from heapr_lab.progress import progress_bar
from heapr_lab.storage import cache
from heapr_lab.storage.files import read_json, write_json
from heapr_lab.storage.hashing import digest
from heapr_lab.tasks.harness import load_tasks
from heapr_lab.tasks.items import task_items
from heapr_lab.tasks.paper_tasks import MEAN, PAPER_TASKS, task_summary
from heapr_lab.text.calibration import CalibrationSet, load_calibration, load_windows

SEQ_LEN = 512
MIXTURE = {
    "wikitext2:tokenized": 0.25,
    "wikitext2": 0.05,
    "ptb": 0.10,
    "c4": 0.25,
    "pydocs": 0.15,
}
"""Shares of the windows; the rest is `EXTRA`, in equal parts."""
EXTRA = ("webtext_uncleaned", "book_war_and_peace")
"""Folders of `$HEAPR_DATA_DIR`, each with one split."""
N_CARVED_WINDOWS = 16
JUDGED = ("wikitext2", "ptb", "c4")
N_JUDGED = 12
"""Windows of each corpus's validation split, for the choice of the layout."""
N_ITEMS = 100
"""Items of each task that the carved model is asked before it is healed."""
_OF_FFN = ("order", "router", "bias", "expert_scale")
"""What the file has of a layer's `CarvedFfn`."""

_TRIAL = HealSpec(12_288)
_HEALING = HealSpec(320_000)
_SETTLING = HealSpec(24_576, learning_rate=0.0)


@dataclass(frozen=True)
class SmolmoeSpec:
    """Everything that determines `smolmoe`, the dense model and the corpora aside."""

    layouts: tuple[str, ...] = (
        "s192e21x64k18",
        "s192e42x32k36",
        "s0e24x64k21",
        "s192e21x64k15",
    )
    """The layouts to try: a token has seven of eight neurons, in the last one six."""
    trial: HealSpec = _TRIAL
    """The healing of each layout that is tried."""
    healing: HealSpec = _HEALING
    """The healing of the chosen layout."""
    settling: HealSpec = _SETTLING
    """The healing of norms, routers and scales once the weights are rounded."""
    seed: int = 0


def training_windows(tokenizer: Any, n_windows: int, *, seed: int) -> torch.Tensor:
    """Windows of the mixture in a random order: (n_windows, SEQ_LEN).

    Raises:
        CorpusError: one of the corpora is not available here.
    """
    folder = Path(os.environ.get("HEAPR_DATA_DIR", "."))
    files = {name: str(folder / name / "train.parquet") for name in EXTRA}
    mixture = " + ".join(
        f"{share:.4f}*{files.get(name, name)}" for name, share in shares().items()
    )
    drawn = load_calibration(
        mixture, tokenizer, n_sequences=n_windows, seq_len=SEQ_LEN, seed=seed
    )
    order = torch.randperm(n_windows, generator=torch.Generator().manual_seed(seed))
    return drawn.ids[order]


def shares() -> dict[str, float]:
    """The share of the windows of every corpus."""
    rest = (1 - sum(MIXTURE.values())) / len(EXTRA)
    return MIXTURE | {name: round(rest, 4) for name in EXTRA}


def judged_windows(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Validation windows of each corpus that layouts are judged on."""
    return {
        name: load_windows(
            name, tokenizer, seq_len=SEQ_LEN, n_sequences=N_JUDGED, split="validation"
        ).ids
        for name in JUDGED
    }


def perplexities(model: Any, windows: dict[str, torch.Tensor]) -> dict[str, float]:
    """The perplexity on each corpus."""
    return {
        name: round(evaluate_perplexity(model, ids).value, 3)
        for name, ids in windows.items()
    }


def accuracy(model: Any, tokenizer: Any) -> dict[str, float]:
    """The mean accuracy on the paper's seven tasks, and its standard error."""
    items = task_items(model, tokenizer, n_items=N_ITEMS)
    mean = task_summary(items).set_index("task").loc[MEAN]
    return {name: round(float(mean[name]), 4) for name in ("value", "stderr")}


def carved(dense: Any, ids: torch.Tensor, layout: Layout, seed: int) -> tuple[Any, Any]:
    """A copy of `dense` with carved layers, and the carvings."""
    with progress_bar(f"carving {layout.name}", "layer") as bar:
        carvings = carve(dense, ids, layout, seed=seed, progress=bar)
    student = copy.deepcopy(dense)
    for layer, carving in zip(student.model.layers, carvings, strict=True):
        layer.mlp = CarvedFfn(layer.mlp, carving, layout)
    return student, carvings


def try_layout(
    name: str, dense: Any, tokenizer: Any, spec: SmolmoeSpec, work: Path
) -> dict[str, Any]:
    """How good a layout is before and after a little healing, kept in `work`."""
    path = work / f"trial-{name}.json"
    if not path.exists():
        write_json(path, _tried(Layout.named(name), dense, tokenizer, spec))
    return dict(read_json(path))


def _tried(
    layout: Layout, dense: Any, tokenizer: Any, spec: SmolmoeSpec
) -> dict[str, Any]:
    judged = judged_windows(tokenizer)
    fitted = training_windows(tokenizer, N_CARVED_WINDOWS, seed=spec.seed + 1)
    student, carvings = carved(dense, fitted, layout, spec.seed)
    before = perplexities(student, judged)
    ids = training_windows(tokenizer, spec.trial.n_windows(SEQ_LEN), seed=spec.seed)
    with progress_bar(f"healing {layout.name}", "step") as bar:
        kl = heal(student, dense, ids, spec.trial, on_step=lambda s, n, _kl: bar(s, n))
    for layer in student.model.layers:
        layer.mlp.load.zero_()
    after = perplexities(student, judged)
    shares = load_shares(student)
    return {
        "layout": asdict(layout),
        "captured": round(sum(c.captured for c in carvings) / len(carvings), 4),
        "carved": before,
        "healed": after,
        "kl": [round(value, 4) for value in kl],
        "load": [round(float(shares.min()), 3), round(float(shares.max()), 3)],
    }


def dense_model() -> tuple[Any, Any]:
    """`smollm2` with plain feed-forward layers, in float32, and its tokenizer."""
    model, tokenizer = load_model(
        smollm2_folder(), device="cpu", dtype="float32", stream=False
    )
    dense_ffns(model)
    return model, tokenizer


def build_smolmoe(out: Path, work: Path, spec: SmolmoeSpec | None = None) -> Path:
    """Choose the layout, heal it, and write its change of the dense model to `out`.

    Everything that takes long is kept in `work`, from which an interrupted run goes on.
    It has a folder for each spec and text, so that none reads what another has left.

    Args:
        out: folder for `delta.safetensors` and `training.json`.
        work: folder of the trials and of the state of the healing.
        spec: layouts, lengths and seed.

    Raises:
        CorpusError: one of the corpora or tasks is not available here.
        SpecError: the dense model cannot be had, another run writes to `work`, or `out`
            has the model of another spec.
    """
    spec = spec or SmolmoeSpec()
    _check_out(out, spec)
    load_tasks(list(PAPER_TASKS))
    work.mkdir(parents=True, exist_ok=True)
    with cache.writing(work):
        dense, tokenizer = dense_model()
        kept = work / _key(tokenizer, spec)[:16]
        kept.mkdir(exist_ok=True)
        trials = {
            name: try_layout(name, dense, tokenizer, spec, kept)
            for name in spec.layouts
        }
        chosen = min(trials, key=lambda name: _mean_log(trials[name]))
        record = heal_layout(chosen, dense, tokenizer, spec, kept, out)
    record |= {"spec": asdict(spec), "trials": trials, "chosen": chosen}
    record |= {"n_judged": N_JUDGED, "n_items": N_ITEMS, "torch": torch.__version__}
    path = out / "training.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    write_card(out, shares(), SEQ_LEN)
    return out


def _check_out(out: Path, spec: SmolmoeSpec) -> None:
    """Check that `out` has no model of another spec.

    Raises:
        SpecError: it has.
    """
    path = out / "training.json"
    asked = asdict(spec)
    there = read_json(path)["spec"] if path.is_file() else asked
    others = [name for name in asked if digest(asked[name]) != digest(there.get(name))]
    if others:
        raise SpecError(
            f"{path} is of a smolmoe with another {' and '.join(others)} than asked "
            "for: give another folder (--out), or delete this one"
        )


def _key(tokenizer: Any, spec: SmolmoeSpec) -> str:
    """Hash of the spec, of the wheel, and of the corpora by windows of each."""
    n_windows = spec.healing.n_windows(SEQ_LEN)
    windows = judged_windows(tokenizer)
    windows["training"] = training_windows(tokenizer, n_windows, seed=spec.seed)
    texts = {n: CalibrationSet.from_ids(ids).fingerprint for n, ids in windows.items()}
    return digest({"spec": asdict(spec), "wheel": WHEEL.sha256, "texts": texts})


def heal_layout(
    name: str, dense: Any, tokenizer: Any, spec: SmolmoeSpec, work: Path, out: Path
) -> dict[str, Any]:
    """Carve, heal, round the change, settle, and write it; the record of all that."""
    layout = Layout.named(name)
    fitted = training_windows(tokenizer, N_CARVED_WINDOWS, seed=spec.seed + 1)
    student, carvings = carved(dense, fitted, layout, spec.seed)
    sizes = [run.n_windows(SEQ_LEN) for run in (spec.healing, spec.settling)]
    ids, more = training_windows(tokenizer, sum(sizes), seed=spec.seed).split(sizes)
    judged = judged_windows(tokenizer)
    record: dict[str, Any] = {"dense": perplexities(dense, judged)}
    record["carved"] = accuracy(student, tokenizer)
    with progress_bar(f"healing {name}", "step") as bar:
        kl = heal(
            student,
            dense,
            ids,
            spec.healing,
            state=work / f"state-{name}.safetensors",
            on_step=lambda step, n, _kl: bar(step, n),
        )
    record["healed"] = perplexities(student, judged)
    change = rounded_change(student, dense)
    record["rounded"] = perplexities(student, judged)
    kl += heal(student, dense, more, spec.settling)
    for layer in student.model.layers:
        layer.mlp.load.zero_()
    record["settled"] = perplexities(student, judged)
    shares = load_shares(student)
    record["load"] = [round(float(shares.min()), 3), round(float(shares.max()), 3)]
    record["kl"] = [round(value, 4) for value in kl]
    record |= _sizes(student, layout)
    record["captured"] = [round(carving.captured, 4) for carving in carvings]
    out.mkdir(parents=True, exist_ok=True)
    described(student, change, layout).write(out / "delta.safetensors")
    return record


def rounded_change(student: Any, dense: Any) -> list[dict[str, Ternary]]:
    """What was changed of `dense`, by layer, rounded in `student` too."""
    return [
        layer.mlp.round_change(other.mlp)
        for layer, other in zip(student.model.layers, dense.model.layers, strict=True)
    ]


def _sizes(student: Any, layout: Layout) -> dict[str, int]:
    """Parameters of the written model, whose experts' scales are multiplied in."""
    ffns = [layer.mlp for layer in student.model.layers]
    everything = sum(weight.numel() for weight in student.parameters())
    routed = sum(3 * ffn.down_proj.shape[0] for ffn in ffns)
    return {
        "parameters": everything - layout.n_experts * len(ffns),
        "routed_parameters": routed * layout.n_experts * layout.d_inter,
    }


def described(
    student: Any, changes: Sequence[dict[str, Ternary]], layout: Layout
) -> Carved:
    """What turns the dense model into `student`."""
    layers = [
        {name: getattr(layer.mlp, name).detach() for name in _OF_FFN}
        | {name: getattr(layer, name).weight.detach() for name in NORMS}
        | {f"{name}.packed": part.packed for name, part in change.items()}
        | {f"{name}.scale": part.scale for name, part in change.items()}
        for layer, change in zip(student.model.layers, changes, strict=True)
    ]
    norm = student.model.norm.weight.detach()
    return Carved(layout, WHEEL.sha256, tuple(layers), norm)


def _mean_log(trial: dict[str, Any]) -> float:
    """The mean logarithm of the perplexities after the trial's healing."""
    healed = trial["healed"].values()
    return sum(map(math.log, healed)) / len(healed)
