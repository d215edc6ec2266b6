"""The paper's own statements, each with a verdict from what was measured.

Twelve sentences and tables of the paper. A claim *agrees* or *disagrees* where a 95 %
interval over windows, items, draws or models lies on one side, is *undecided* where it
does not, and *cannot be tested here* where nothing was measured. There is no threshold
that is not the paper's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from heapr_lab.experiments.answers import (
    Answer,
    answer,
    claim_in_words,
    listed,
    published_pairs,
    published_rises,
    value_range,
)
from heapr_lab.experiments.intervals import (
    AGREES,
    DISAGREES,
    UNDECIDED,
    UNTESTED,
    VERDICTS,
    Interval,
    accuracy_difference,
    ends_above_middle,
    interval_of,
    loss_difference,
    loss_differences,
    verdict_of,
)
from heapr_lab.figures.curves import paper_table
from heapr_lab.pruning.savings import at_context
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

MODERATE = (0.2, 0.25)
"""The ratios at which the paper calls pruning nearly lossless."""
RIVALS = (
    "naee", "moe-i2-like", "moe-svd-like", "d2-moe", "mc-smoe", "hc-smoe",
    "sub-moe-like",
)  # fmt: skip
"""The methods of the paper's main table."""
ON_C4 = "heapr on c4"
"""The method, among windows and items, that is HEAPr calibrated on C4."""
_NO_WINDOWS = pd.DataFrame(columns=["method", "ratio", "corpus", "window", "nll"])
_SAME_SCORES = "tests/oracle/test_two_stage.py"


@dataclass(frozen=True)
class Evidence:
    """What was measured of one model; a frame is empty where nothing was."""

    calibrated_on: str
    windows: pd.DataFrame = field(default_factory=_NO_WINDOWS.copy)
    """Columns method, ratio, corpus, window, nll [nats per token]."""
    items: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Columns method, ratio, and those of `task_items`."""
    kept: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The share of the accuracy that is kept, by the share of the whole model that is
    removed: columns of `intervals.kept_of_boundary`."""
    savings: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Columns ratio, granularity, flops_reduction, seq_len."""
    bins: pd.DataFrame = field(default_factory=pd.DataFrame)
    """From `figures.bins_data`."""
    shares: pd.DataFrame = field(default_factory=pd.DataFrame)
    """From `paper.layer_shares`."""
    draws: pd.DataFrame = field(default_factory=pd.DataFrame)
    """From `paper.calibration_results`."""
    results: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Evaluation rows of the dense model and every setting; figures show them."""
    rivals: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Rows of `benchmarks/methods.py`: model, seed, variant, ratio, `delta_nll
    CORPUS`."""
    gpu: pd.DataFrame = field(default_factory=pd.DataFrame)
    """What scoring the paper's models takes on a GPU: columns model (the beginning of
    its name), way, device, seconds, peak_bytes."""

    def windows_on(self, *, calibrated: bool) -> pd.DataFrame:
        """The windows of the calibrated corpus, or those of all other text."""
        return self.windows[
            self.windows["corpus"].eq(self.calibrated_on).eq(calibrated)
        ]


@dataclass(frozen=True)
class Finding:
    """A verdict, and the numbers that it comes from."""

    verdict: str
    found: str
    """What decides, up to the first semicolon, and what is beside it."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, its numbers, and how it is tested."""

    says: str
    paper: Callable[[], str]
    test: Callable[[Evidence], Finding | None]
    """Returns None where nothing was measured."""
    missing: str = "not measured"


def claims(evidence: Evidence) -> pd.DataFrame:
    """Every claim with its verdict on one model.

    Returns:
        Columns number, claim, paper (its numbers), found and verdict.
    """
    rows = []
    for number, claim in enumerate(CLAIMS, start=1):
        finding = claim.test(evidence) or Finding(UNTESTED, claim.missing)
        said = number, claim.says, claim.paper(), finding.found, finding.verdict
        rows.append(said)
    columns = ["number", "claim", "paper", "found", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def answer_of(
    evidence: Evidence, *numbers: int, also: str = "", model: str = "This model"
) -> Answer:
    """Some of the claims as the answer of a notebook, refuted ones first.

    Args:
        evidence: what was measured.
        numbers: of the claims.
        also: sentences that follow.
        model: what the evidence is of, at the beginning of a sentence.
    """
    table = claims(evidence).set_index("number").loc[[*numbers]]
    places = table["verdict"].map(VERDICTS.index).sort_values(kind="stable")
    rows = table.loc[places.index].to_dict("records")
    sentences = [claim_in_words(row, model) for row in rows]
    return answer(" ".join(filter(None, [*sentences, also])))


# --- the paper's numbers ----------------------------------------------------------


def _published_losses() -> str:
    rises = value_range(published_rises(), "+.1%")
    return f"up to 25 %: perplexity {rises}, accuracy {-_largest_drop():+.2f} to 0"


def _largest_drop() -> float:
    """The most that HEAPr loses of the mean accuracy at up to 25 %."""
    averages = published_pairs("average")
    return float((averages["Original"] - averages["HEAPr"]).max())


def _published_firsts() -> str:
    """In how many cells of the paper's main table HEAPr is first, of each kind."""
    table = paper_table("main_results")
    keys = ["model", "ratio"]
    wide = table[table["ratio"].gt(0)].set_index([*keys, "method"]).astype(float)
    counts = {}
    for kind, names, best in (
        ("perplexities", ["wikitext2_ppl", "ptb_ppl"], "min"),
        ("mean accuracies", ["average"], "max"),
        ("accuracies of a task", [*PAPER_TASKS], "max"),
    ):
        bests = wide[names].groupby(keys).agg(best)
        firsts = bests.eq(wide[names].xs("HEAPr", level="method")).to_numpy()
        counts[kind] = f"{firsts.sum()} of {firsts.size} {kind}"
    return f"first, alone or with another, in {listed(counts.values())}"


def _published_averages(*names: str) -> str:
    table = paper_table("global_vs_layer")
    rows = table[table["method"].isin(names)]
    models = rows.groupby("model")["method"].nunique()
    averages = rows[rows["model"].eq(models.idxmax())]
    texts = [
        f"{ratio:.0%}: " + ", ".join(part.set_index("method").loc[[*names], "average"]
        .map("{:.1f}".format))
        for ratio, part in averages.groupby("ratio")
    ]  # fmt: skip
    return f"mean accuracy of {', '.join(names)} at {'; '.join(texts)}"


def _published_grain() -> str:
    table = paper_table("granularity")
    wide = table.pivot(index="ratio", columns="level", values="wikitext2_ppl")
    text = "; ".join(
        f"{row['Atomic Expert']} against {row['Expert']} at {ratio:.0%}"
        for ratio, row in wide.iterrows()
    )
    return f"perplexity {text}; whole experts save no FLOPs"


def _published_flops() -> str:
    form = "{flops_reduction:.0%} at {ratio:.0%}"
    rows = paper_table("granularity").query("level == 'Atomic Expert'")
    text = _rows_as(form, rows, between=" and ")
    return f'"nearly 20%" in its abstract, {text} in its table'


def _published_boundary() -> str:
    form = "{accuracy_retained:.0%} of the accuracy and {flops_reduction:.0%} fewer "
    form += "FLOPs at {share_of_model_removed} of the model"
    return _rows_as(form, paper_table("boundary"))


def _published_cost() -> str:
    rows = paper_table("cost").query("method == 'HEAPr'")
    return _rows_as("{model}: {gpu_minutes} min, {memory_gb} GB", rows)


def _rows_as(form: str, rows: pd.DataFrame, *, between: str = "; ") -> str:
    """Rows as text, each in a form with names of columns."""
    return between.join(form.format_map(row) for row in rows.to_dict("records"))


# --- tests ------------------------------------------------------------------------


def _same_scores(_: Evidence) -> Finding:
    text = f"equal in float64 on tiny models, from one pass (`{_SAME_SCORES}`)"
    return Finding(AGREES, text)


def _first_of_rivals(evidence: Evidence) -> Finding | None:
    """How much more each rival loses than HEAPr, over models or else over windows."""
    if not evidence.rivals.empty:
        return _over_models(evidence)
    gaps = {
        f"{name} {at}": gap
        for name in RIVALS
        for at, gap in _gaps_by_text(evidence, name, "heapr").items()
    }
    if not gaps:
        return None
    of_losses = _against_rivals(gaps, "paired over the windows of both")
    ratios = sorted(evidence.items["ratio"].unique()) if len(evidence.items) else []
    accuracies = [
        accuracy_difference(evidence.items, "heapr", name, ratio)
        for name in RIVALS
        for ratio in ratios
    ]
    verdicts = [gap.verdict for gap in accuracies if gap is not None]
    text = of_losses.found
    if verdicts:
        text += (
            f"; its accuracy is higher in {verdicts.count(AGREES)} of {len(verdicts)}, "
            f"lower in {verdicts.count(DISAGREES)}"
        )
    return Finding(verdict_of([of_losses.verdict, *verdicts]), text)


def _over_models(evidence: Evidence) -> Finding:
    """The mean loss above HEAPr's, on the same draws and ratios, over models."""
    losses = evidence.rivals.pivot_table(
        index=["model", "seed", "ratio"],
        columns="variant",
        values=f"delta_nll {evidence.calibrated_on}",
    )
    more = losses.sub(losses["heapr"], axis="index").groupby("model").mean()
    gaps = {name: interval_of(more[name].dropna()) for name in RIVALS if name in more}
    nearest = more[_nearest(gaps)].dropna()
    apart = value_range(nearest, "+.3f")
    return _against_rivals(gaps, f"the mean of {listed(nearest.index)} ({apart})")


def _nearest(gaps: Mapping[str, Interval]) -> str:
    return min(gaps, key=lambda name: gaps[name].value)


def _against_rivals(gaps: Mapping[str, Interval], over: str) -> Finding:
    """The verdict on all rivals: undecided at best while one of them is missing."""
    nearest = _nearest(gaps)
    verdicts = [gap.verdict for gap in gaps.values()]
    text = (
        f"HEAPr loses less in {verdicts.count(AGREES)} of {len(gaps)} comparisons and "
        f"more in {verdicts.count(DISAGREES)}; the closest rival is {nearest}: "
        f"{gaps[nearest].said_as('nats')}, {over}"
    )
    missing = [name for name in RIVALS if not any(at.startswith(name) for at in gaps)]
    if missing:
        verdicts.append(UNDECIDED)
        text += f"; not measured: {', '.join(missing)}"
    return Finding(verdict_of(verdicts), text)


def _nearly_lossless(evidence: Evidence) -> Finding | None:
    """No more lost than on the paper's model that loses most at up to 25 %."""
    most, drop = math.log1p(published_rises().max()), _largest_drop()
    windows, corpus = evidence.windows_on(calibrated=True), evidence.calibrated_on
    texts, verdicts = [], []
    for ratio in MODERATE:
        loss = loss_difference(windows, "heapr", "dense", ratio)
        if loss is not None:
            rise = loss.mapped(math.expm1).said("+.0%")
            other = loss_difference(
                evidence.windows_on(calibrated=False), "heapr", "dense", ratio
            )
            beside = other.mapped(math.expm1).said("+.0%") if other else "not measured"
            texts.append(
                f"at {ratio:.0%} perplexity of {corpus} {rise}, of other text {beside}"
            )
            verdicts.append(loss.mapped(lambda x: most - x).verdict)
        right = accuracy_difference(evidence.items, "heapr", "dense", ratio)
        if right is not None:
            texts.append(f"accuracy {right.said('+.2f')}")
            verdicts.append(right.mapped(lambda x: x + drop).verdict)
    return _all_of(verdicts, texts)


def _all_of(verdicts: Sequence[str], texts: Sequence[str]) -> Finding | None:
    return Finding(verdict_of(verdicts), "; ".join(texts)) if texts else None


def _flops(evidence: Evidence) -> Finding | None:
    """Whether the count is nearer to the abstract's or to the table's."""
    if evidence.savings.empty:
        return None
    saved = evidence.savings[evidence.savings["granularity"].eq("atom")]
    saved = saved.drop_duplicates("ratio").set_index("ratio")["flops_reduction"]
    stated = paper_table("granularity").query("level == 'Atomic Expert'")
    table = stated.set_index("ratio")["flops_reduction"][0.2]
    share = saved[0.2]
    verdict = DISAGREES if abs(share - table) < abs(share - 0.2) else AGREES
    text = " and ".join(f"{saved[r]:.1%} at {r:.0%}" for r in MODERATE if r in saved)
    text += f" of the atoms ({at_context(evidence.savings['seq_len'].iloc[0])})"
    nearer = {DISAGREES: "its table than its abstract", AGREES: "its abstract"}
    return Finding(verdict, f"{text}: nearer {nearer[verdict]}")


def _ordered(*pairs: tuple[str, str]) -> Callable[[Evidence], Finding | None]:
    """The first of each pair loses more than the second, on every kind of text."""

    def test(evidence: Evidence) -> Finding | None:
        texts, verdicts = [], []
        for method, other in pairs:
            gaps = _gaps_by_text(evidence, method, other)
            if gaps:
                verdicts += [gap.verdict for gap in gaps.values()]
                texts.append(f"{method} loses {_counted(gaps, other)}")
        return _all_of(verdicts, texts)

    return test


def _atoms_and_experts(evidence: Evidence) -> Finding | None:
    """Whether whole experts lose more, and the FLOPs that they save here."""
    finding = _ordered(("heapr-expert", "heapr"))(evidence)
    if finding is None or "expert" not in {*evidence.savings.get("granularity", ())}:
        return finding
    whole = evidence.savings[evidence.savings["granularity"].eq("expert")]
    text = _rows_as("{flops_reduction:.1%} at {ratio:.0%}", whole, between=" and ")
    return replace(
        finding,
        found=f"{finding.found}; whole experts save {text} of the FLOPs where nothing "
        "takes the place of one, as here, and none where the router's next choice "
        "does, as in the paper",
    )


def _gaps_by_text(evidence: Evidence, method: str, other: str) -> dict[str, Interval]:
    """How much more `method` loses than `other`, by ratio and text."""
    ratios = sorted(evidence.windows["ratio"].unique())
    return {
        f"at {ratio:.0%}{where}": gap
        for where, calibrated in (("", True), (" on other text", False))
        for ratio, gap in loss_differences(
            evidence.windows_on(calibrated=calibrated), method, other, ratios
        ).items()
    }


def _counted(gaps: Mapping[str, Interval], other: str) -> str:
    """In how many comparisons less and more is lost, and the one that decides."""
    verdicts = [gap.verdict for gap in gaps.values()]
    decisive = {a: g for a, g in gaps.items() if g.verdict == verdict_of(verdicts)}
    at = min(decisive, key=lambda at: decisive[at].value)
    less, more = verdicts.count(DISAGREES), verdicts.count(AGREES)
    return (
        f"less than {other} in {less} of {len(gaps)} comparisons and more in {more} "
        f"({gaps[at].in_short()} nats {at})"
    )


def _predicts(evidence: Evidence) -> Finding | None:
    if evidence.bins.empty:
        return None
    rows = evidence.bins[evidence.bins["order"].eq("index")]
    rho = Interval(*rows[["rho", "rho_low", "rho_high"]].iloc[0])
    times = rows["delta_nll"] / rows["score_sum"]
    worst = rows["delta_nll"].idxmax()
    return Finding(
        rho.verdict,
        f"Spearman {rho.said('.2f')}; the costliest tenth: {times[worst]:.1f} × its "
        f"scores, the others {value_range(times.drop(worst), '.1f')} ×",
    )


def _boundary(evidence: Evidence) -> Finding | None:
    """What is kept and saved at the largest share below the paper's first position."""
    if evidence.kept.empty:
        return None
    first, last = paper_table("boundary").to_dict("records")
    share = float(str(first["share_of_model_removed"]).lstrip("<"))
    within = evidence.kept[evidence.kept["removed"].lt(share)]
    if within.empty:
        return None
    at = within.loc[within["removed"].idxmax()]
    kept = Interval(at["value"], at["low"], at["high"])
    verdicts = [kept.mapped(lambda x: x - first["accuracy_retained"]).verdict]
    text = f"{kept.said('.0%')} of the accuracy"
    if pd.notna(at["flops"]):
        enough = at["flops"] >= first["flops_reduction"]
        verdicts.append(AGREES if enough else DISAGREES)
        text += f" and {at['flops']:.0%} fewer FLOPs"
    text += f" at {at['removed']:.0%} of the model (guessing: {at['guessing']:.0%})"
    most = evidence.kept["removed"].max()
    end = float(last["share_of_model_removed"])
    routed = at["removed"] / at["ratio"]
    further = f"measured to {most:.0%}"
    if routed < end:
        further += f"; {end:.0%} cannot be reached: routed experts are {routed:.0%}"
    return Finding(verdict_of(verdicts), f"{text}; {further}")


def _corpora(evidence: Evidence) -> Finding | None:
    """WikiText-2 in place of C4; unaffected means no difference, of loss or accuracy.

    The paper says it of the mean accuracy.
    """
    gaps = _over_draws(evidence.draws, "nll") or _over_windows(evidence.windows)
    if not gaps:
        return None
    losses = ", ".join(f"{gap.said()} on {corpus}" for corpus, gap in gaps.items())
    of_draws = _over_draws(evidence.draws, "accuracy").values()
    right = next(iter(of_draws), None) or _accuracy_over_corpora(evidence.items)
    verdicts = {gap.verdict for gap in [*gaps.values(), *filter(None, [right])]}
    accuracy = right.said() if right else "not measured"
    return Finding(
        UNDECIDED if verdicts == {UNDECIDED} else DISAGREES,
        f"wikitext2 in place of c4{_calibrated_with(evidence)}: nats per token "
        f"{losses}; accuracy, of which the paper speaks, {accuracy}",
    )


def _calibrated_with(evidence: Evidence) -> str:
    """The ratio of the masks that are compared, and the draws of each corpus."""
    draws, windows = evidence.draws, evidence.windows
    if draws.empty:
        ratios, n = windows.loc[windows["method"].eq(ON_C4), "ratio"], 1
    else:
        ratios, n = draws["ratio"], draws["seed"].nunique()
    return f" at {ratios.max():.0%} ({n} draw{'s' * (n > 1)} of each)"


def _accuracy_over_corpora(items: pd.DataFrame) -> Interval | None:
    """By how much calibration on WikiText-2 answers more than that on C4."""
    if items.empty or ON_C4 not in set(items["method"]):
        return None
    ratio = items.loc[items["method"].eq(ON_C4), "ratio"].iloc[0]
    return accuracy_difference(items, "heapr", ON_C4, ratio)


def _over_draws(rows: pd.DataFrame, metric: str) -> dict[str, Interval]:
    """The difference that calibration on the other one makes, by what is tested."""
    pair = ("wikitext2", "c4")
    if rows.empty or not {*pair} <= {*rows["calibration"]}:
        return {}
    rows = rows[rows["metric"].eq(metric) & rows["calibration"].isin(pair)]
    rows = rows[rows["n_sequences"].eq(rows["n_sequences"].max())]
    gaps = {}
    for name, part in rows.groupby("dataset"):
        wide = part.pivot(index="seed", columns="calibration", values="value")
        gaps[str(name)] = interval_of(wide[pair[0]] - wide[pair[1]])
    return gaps


def _over_windows(windows: pd.DataFrame) -> dict[str, Interval]:
    """The same difference for one draw of each, at the one ratio of `ON_C4`."""
    ratios = windows.loc[windows["method"].eq(ON_C4), "ratio"].unique()
    return {
        str(corpus): gap
        for corpus, part in windows.groupby("corpus")
        for gap in loss_differences(part, "heapr", ON_C4, ratios).values()
    }


def _by_layer(evidence: Evidence) -> Finding | None:
    if evidence.shares.empty:
        return None
    texts, verdicts = [], []
    for ratio, part in evidence.shares.groupby("ratio"):
        ends = ends_above_middle(part)
        verdicts += [end.verdict for end in ends]
        early, late = (
            end.mapped(lambda share: 100 * share).said_as("points", ".0f")
            for end in ends
        )
        texts.append(
            f"at {ratio:.0%} ({part['seed'].nunique()} draws) the first third of the "
            f"layers loses {early} of its atoms than the middle, the last layer {late}"
        )
    return _all_of(verdicts, texts)


def _cost_on_gpu(evidence: Evidence) -> Finding | None:
    """Whether some way of scoring takes no more of either than the paper says."""
    if evidence.gpu.empty:
        return None
    verdicts, texts = [], []
    for row in paper_table("cost").query("method == 'HEAPr'").to_dict("records"):
        name = row["model"]
        runs = evidence.gpu[[name.startswith(model) for model in evidence.gpu["model"]]]
        if runs.empty:
            verdicts.append(UNDECIDED)
            texts.append(f"{name}: not measured as a whole")
            continue
        minutes, gigabytes = runs["seconds"] / 60, runs["peak_bytes"] / 1e9
        within = minutes.le(row["gpu_minutes"]) & gigabytes.le(row["memory_gb"])
        verdicts.append(AGREES if within.any() else DISAGREES)
        cells = zip(runs["device"], minutes, gigabytes, runs["way"], strict=True)
        ways = (
            f"{device}: {time:.1f} min, {size:.0f} GB ({way})"
            for device, time, size, way in cells
        )
        texts.append(f"{name}, random weights, {'; '.join(ways)}")
    return _all_of(verdicts, texts)


CLAIMS = (
    Claim("two forward passes and one backward, d × d per expert", str, _same_scores),
    Claim(
        "HEAPr loses less than each of its seven rivals",
        _published_firsts,
        _first_of_rivals,
        missing="not measured by this run: see benchmarks/README.md",
    ),
    Claim("nearly lossless at 20 to 25 %", _published_losses, _nearly_lossless),
    Claim("FLOPs fall by nearly 20 % at 20 to 25 %", _published_flops, _flops),
    Claim(
        "CAMERA-P loses more than HEAPr-L, and HEAPr-L more than HEAPr-G",
        lambda: _published_averages("CAMERA-P", "HEAPr-L", "HEAPr-G"),
        _ordered(("camera-p", "heapr-l"), ("heapr-l", "heapr")),
    ),
    Claim(
        "global ranking beats layer-wise ranking",
        lambda: _published_averages("HEAPr-L", "HEAPr-G"),
        _ordered(("heapr-l", "heapr")),
    ),
    Claim(
        "atoms beat whole experts",
        _published_grain,
        _atoms_and_experts,
    ),
    Claim(
        "the loss of each tenth of the model follows its summed score",
        lambda: "only drawn",
        _predicts,
    ),
    Claim("the pruning boundary", _published_boundary, _boundary),
    Claim(
        "largely unaffected by the calibration corpus, WikiText-2 or C4",
        lambda: "only drawn",
        _corpora,
        "not calibrated on both",
    ),
    Claim(
        "early layers lose most, the middle least, the last ones more again",
        lambda: "only drawn",
        _by_layer,
    ),
    Claim(
        "minutes and memory on a GPU",
        _published_cost,
        _cost_on_gpu,
        missing="not measured by this run: see benchmarks/README.md",
    ),
)
"""The claims, in the order of the paper."""
