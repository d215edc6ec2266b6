"""Rounds of pruning: nested masks, scores of what is left, counts that add up."""

import itertools
import re

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import zeroed_twin

from heapr_lab.errors import SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import find_experts
from heapr_lab.models.likelihood import sampled_targets
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.ranking import GONE
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement import activation_grams, iterative
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.iterative import Rounds, prune_in_rounds
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=6, seq_len=20))


def masks_of_rounds(
    monkeypatch: pytest.MonkeyPatch, rounds: int, **choice: object
) -> list[KeepMask]:
    """The mask after each round, the last one as it is returned."""
    masks: list[KeepMask] = []

    def noted(*args: object, **kwargs: object) -> KeepMask:
        masks.append(select(*args, **kwargs))  # type: ignore[arg-type]
        return masks[-1]

    monkeypatch.setattr(iterative, "select", noted)
    model = tiny_model("qwen2_moe")
    found = prune_in_rounds(model, WINDOWS, ratio=0.7, rounds=rounds, **choice)
    assert found.keep == masks[-1]
    return masks


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize(
    "choice",
    [{}, {"scope": "layer"}, {"structure": "aligned", "multiple": 2}],
    ids=str,
)
def test_masks_of_rounds_are_nested(
    monkeypatch: pytest.MonkeyPatch, compensated: bool, choice: dict[str, object]
) -> None:
    """What went in a round never comes back, for every scope and structure."""
    masks = masks_of_rounds(monkeypatch, 4, compensated=compensated, **choice)
    assert len(masks) == 4
    for before, after in itertools.pairwise(masks):
        assert after.n_kept < before.n_kept
        for layer in before.layers:
            assert not (after.by_layer(layer) & ~before.by_layer(layer)).any()


def test_one_round_is_a_selection() -> None:
    """Without compensation, on the same statistics, to the atom."""
    model = tiny_model("qwen2_moe")
    table = collect_statistics(model, WINDOWS)
    once = prune_in_rounds(model, WINDOWS, ratio=0.4, rounds=1, compensated=False)
    assert once.keep == select(table, ratio=0.4)
    assert once.compensation is None


def test_a_round_scores_what_the_one_before_left() -> None:
    """The second of two rounds ranks atoms by statistics of the sliced model."""
    model = tiny_model("qwen2_moe")
    with torch.no_grad():
        for layer in find_experts(model):
            layer.down.mul_(20)  # so that what is gone matters to what is left
    two = prune_in_rounds(
        model, WINDOWS, ratio=0.8, rounds=2, compensated=False, estimator="fisher"
    )
    half = select(collect_statistics(model, WINDOWS), ratio=0.4, estimator="fisher")
    twin = zeroed_twin(model, half)
    scores = collect_statistics(twin, WINDOWS).score("fisher").to_numpy().copy()
    kept = np.concatenate([half.by_layer(k).ravel() for k in half.layers])
    scores[~kept] = -1.0
    order = np.argsort(scores, kind="stable")
    expected = np.ones(len(scores), bool)
    expected[order[: int(0.8 * len(scores))]] = False
    found = np.concatenate([two.keep.by_layer(k).ravel() for k in two.keep.layers])
    assert (found == expected).all()
    once = select(collect_statistics(model, WINDOWS), ratio=0.8, estimator="fisher")
    assert two.keep != once


def test_scores_of_a_round_see_its_weights() -> None:
    """Norms are those of the compensated columns, 0 where atoms are gone."""
    model = tiny_model("qwen2_moe")
    half = select(collect_statistics(model, WINDOWS), ratio=0.5)
    found = fit_compensation(model, half, WINDOWS)
    table = iterative._scored(model, WINDOWS, half, found, progress=lambda *_now: None)
    norms = [found.downs[k].square().sum(1).flatten() for k in half.layers]
    np.testing.assert_allclose(table.column("w_down_sq"), torch.cat(norms), rtol=1e-6)
    kept = np.concatenate([half.by_layer(k).ravel() for k in half.layers])
    assert (table.column("w_down_sq")[~kept] == 0).all()
    plain = prune(model, half, downs=found.downs)
    assert plain.heapr_weights.startswith("W_down replaced")


def test_what_is_gone_stays_gone_where_it_would_be_protected() -> None:
    """An expert that lost atoms, and then its tokens, does not get them back."""
    model = tiny_model("qwen2_moe")
    frame = collect_statistics(model, WINDOWS).frame
    frame[GONE] = frame["expert"].eq(0) & frame["atom"].lt(4)
    frame.loc[frame["expert"].eq(0), "tokens"] = 0
    table = ImportanceTable.from_frame(frame, N=10)
    keep = select(table, ratio=0.25, protect_unrouted=True)
    assert not keep.by_layer(0)[0, :4].any()
    assert keep.by_layer(0)[0, 4:].all()


def test_what_a_round_leaves_can_be_saved_compensated() -> None:
    """The weights that come with the last mask are those for it."""
    model = tiny_model("qwen2_moe")
    done: list[tuple[int, int]] = []
    found = prune_in_rounds(
        model, WINDOWS, ratio=0.5, rounds=3, progress=lambda *now: done.append(now)
    )
    assert found.keep.settings["rounds"] == 3
    assert found.compensation is not None
    assert found.history["achieved_ratio"].is_monotonic_increasing
    assert done[-1] == (4 * 6, 4 * 6)  # the sums, and three scorings
    pruned = prune(model, found.keep, downs=found.compensation.downs)
    assert sum(p.numel() for p in pruned.parameters()) < model.num_parameters()


def test_too_few_rounds_are_refused() -> None:
    """At least one."""
    with pytest.raises(SpecError, match="rounds is 0"):
        prune_in_rounds(tiny_model("qwen2_moe"), WINDOWS, ratio=0.5, rounds=0)


def test_labels_of_the_model_are_drawn_from_it() -> None:
    """Other gradients than of the text, the same activations; in any batches."""
    model = tiny_model("qwen2_moe")
    text = collect_statistics(model, WINDOWS, batch_size=2)
    own = collect_statistics(model, WINDOWS, labels="model", batch_size=2)
    again = collect_statistics(model, WINDOWS, labels="model", batch_size=3)
    np.testing.assert_allclose(own.column("sum_h2"), text.column("sum_h2"))
    assert not np.allclose(own.column("sum_g2"), text.column("sum_g2"))
    np.testing.assert_allclose(own.column("sum_g2"), again.column("sum_g2"))
    assert own.metadata["spec_hash"] != text.metadata["spec_hash"]
    with pytest.raises(SpecError, match="labels is 'teacher'"):
        collect_statistics(model, WINDOWS, labels="teacher")


def test_sampled_targets_follow_the_predictions() -> None:
    """Frequencies of many draws at one position are its probabilities."""
    model = tiny_model("qwen2_moe")
    ids = WINDOWS.ids[:1, :3].repeat(4000, 1)
    drawn = sampled_targets(model, ids, seeds=range(4000))[:, 1]
    with torch.no_grad():
        expected = model(ids[:1]).logits[0, 1].softmax(-1)
    found = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    error = (found - expected).abs()
    assert (error <= 5 * (expected * (1 - expected) / len(drawn)).sqrt()).all()


# --- what a run costs and says ----------------------------------------------------


def history_of(**options: object) -> tuple[Rounds, list[tuple[int, int]]]:
    """Two rounds of the tiny model, and the progress that they reported."""
    done: list[tuple[int, int]] = []
    found = prune_in_rounds(
        tiny_model("qwen2_moe"),
        WINDOWS,
        rounds=2,
        progress=lambda *now: done.append(now),
        **{"ratio": 0.5} | options,
    )
    return found, done


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_passes_are_counted_in_windows(given: bool, compensated: bool) -> None:
    """A scoring for each round, one fewer with a table, and one for the sums."""
    model = tiny_model("qwen2_moe")
    table = collect_statistics(model, WINDOWS) if given else None
    _, done = history_of(table=table, compensated=compensated)
    total = 6 * (2 - given + compensated)
    assert {of for _, of in done} == {total}
    counts = [now for now, _ in done]
    assert counts == sorted(counts)
    assert set(range(6, total + 1, 6)) <= set(counts)


def test_sums_that_do_not_fit_are_collected_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same masks and weights, for a pass more."""
    at_once, _ = history_of()
    monkeypatch.setattr(activation_grams, "_AT_ONCE", 1)
    apart, done = history_of()
    assert done[-1] == (6 * 4, 6 * 4)
    assert apart.keep == at_once.keep
    assert apart.compensation.fingerprint == at_once.compensation.fingerprint
    uncompensated, done = history_of(compensated=False)
    assert done[-1] == (6 * 2, 6 * 2)
    assert uncompensated.compensation is None


def test_the_history_has_a_row_for_each_round() -> None:
    """What is gone after it, and the passes until then."""
    found, _ = history_of(ratio=0.3)
    # ⌊0.15 · 64⌋ and ⌊0.3 · 64⌋ atoms.
    assert found.history.to_dict("records") == [
        {"round": 1, "achieved_ratio": 9 / 64, "passes": 1},
        {"round": 2, "achieved_ratio": 19 / 64, "passes": 2},
    ]
    assert found.keep.settings["ratio"] == 0.3
    assert found.keep.settings["rounds"] == 2
    one = prune_in_rounds(tiny_model("qwen2_moe"), WINDOWS, ratio=0.3, rounds=1)
    assert one.keep.settings["rounds"] == 1
    by_default = prune_in_rounds(tiny_model("qwen2_moe"), WINDOWS, ratio=0.3)
    assert len(by_default.history) == 4
    assert by_default.compensation is not None


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("span", [None, "expert"])
def test_weights_that_come_along_are_those_of_the_span(
    monkeypatch: pytest.MonkeyPatch, span: str | None, at_once: bool
) -> None:
    """As if fitted to the last mask alone; small layers are spanned by default."""
    if not at_once:
        monkeypatch.setattr(activation_grams, "_AT_ONCE", 1)
    found, _ = history_of(span=span)
    model = tiny_model("qwen2_moe")
    expected = fit_compensation(model, found.keep, WINDOWS, span=span or "layer")
    assert found.compensation.settings["span"] == (span or "layer")
    assert found.compensation.fingerprint == expected.fingerprint


def test_a_table_stands_for_the_first_scoring() -> None:
    """Another one gives another mask; one of another model is refused."""
    model = tiny_model("qwen2_moe")
    table = collect_statistics(model, WINDOWS)
    found, _ = history_of(table=table)
    assert found.keep == history_of()[0].keep
    frame = table.frame
    frame["sum_g2"] = frame["sum_g2"].to_numpy()[::-1]
    upside_down = ImportanceTable.from_frame(frame, **table.metadata)
    assert history_of(table=upside_down)[0].keep != found.keep
    other = collect_statistics(tiny_model("qwen2_moe", num_experts=3), WINDOWS)
    with pytest.raises(SpecError, match="the table was made for another model"):
        history_of(table=other)


def test_a_masked_model_is_refused() -> None:
    """It is not the dense one, whose rounds these are."""
    model = tiny_model("qwen2_moe")
    mask = select(collect_statistics(model, WINDOWS), ratio=0.2)
    text = "leave the masking.* block, and begin again with the dense model$"
    with masking(model, mask), pytest.raises(SpecError, match=text):
        prune_in_rounds(model, WINDOWS, ratio=0.5)


def test_what_is_gone_is_marked_layer_by_layer() -> None:
    """With norms of 0 without compensation, and without a mask not at all."""
    model = tiny_model("qwen2_moe")
    dense = iterative._scored(model, WINDOWS, None, None, progress=lambda *_now: None)
    assert GONE not in dense.frame
    rng = np.random.default_rng(0)
    keep = KeepMask.from_arrays({k: rng.random((4, 8)) < 0.5 for k in (0, 1)})
    table = iterative._scored(model, WINDOWS, keep, None, progress=lambda *_now: None)
    assert (table.column(GONE) == ~keep.rows).all()
    expected = np.where(keep.rows, dense.column("w_down_sq"), 0.0)
    np.testing.assert_allclose(table.column("w_down_sq"), expected)
    assert table.frame["w_down_sq"].dtype == dense.frame["w_down_sq"].dtype
    assert table.metadata["N"] == dense.metadata["N"]


def test_rounds_are_shown_with_their_shares() -> None:
    """In a line, and on a card."""
    found, _ = history_of()
    assert repr(found) == "Rounds(2 rounds, pruning ratio 0.5, compensated)"
    without = Rounds(found.keep, None, found.history)
    assert repr(without) == "Rounds(2 rounds, pruning ratio 0.5, not compensated)"
    for rounds, compensated in ((found, "yes"), (without, "no")):
        text = re.sub(r"<[^>]*>", "|", rounds._repr_html_())
        assert [part for part in text.split("|") if part.strip()] == [
            "Pruning in rounds",
            "round 1",
            "25.00% pruned, 1 passes",
            "round 2",
            "50.00% pruned, 2 passes",
            "compensated",
            compensated,
        ]
