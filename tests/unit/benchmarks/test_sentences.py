"""What is said of benchmarks is what their numbers say."""

import pandas as pd
from figure_rows import window_rows

from benchmarks import sentences


def test_merging_is_compared_with_random_atoms_and_dropping():
    """On every model, and what does not follow from how alike experts are is said."""

    def reply(fine: float, dropped: float = 0.1) -> str:
        rows = [
            {"model": model, "variant": name, "ratio": 0.4, "delta_nll pydocs": loss}
            for model, merged in (("fine", fine), ("lab", 0.8), ("upcycled", 0.05))
            for name, loss in (("hc-smoe", merged), ("random", 0.3), ("reap", dropped))
        ]
        return sentences._where_merging_wins(pd.DataFrame(rows), 0.4)

    text = reply(0.2)
    less = "less on the fine (0.200 against 0.300) and the upcycled (0.050 against"
    assert less in text
    assert "and more on the lab (0.800 against 0.300)" in text
    assert "Exceptions: fine. Dropping" in text
    assert "on 2 of 3 models: the fine (0.200 against 0.100) and the lab (0.8" in text
    assert "Exceptions: none. Dropping" in reply(0.4)
    assert "Dropping" not in reply(0.4, dropped=1.0)


def test_the_order_is_compared_with_the_papers():
    """HEAPr's ranks, and those of the others."""
    table = pd.DataFrame({"method": ["heapr", "naee"], "same rank": [True, False]})
    said = "in 1 of 1 of its comparisons, the other methods in 0 of 1"
    assert said in sentences._order(table)


def test_the_default_stands_beside_heapr():
    """Δloss of both on the calibrated corpus and elsewhere, paired."""
    states = {("dense", 0.0): 1.0, ("default", 0.2): 1.3, ("heapr", 0.2): 1.4}
    losses = window_rows(states, "a")
    text = repr(sentences.quality(losses, pd.DataFrame(), "default", "a"))
    assert "default avoids 25% on a of the Δloss that HEAPr has, where 20% of" in text
    assert "at 20% 0.30 against 0.40 (-0.10 to -0.10) on a" in text
    assert "other text" not in text
    assert "HEAPr's: not measured." in text
    more = losses[losses["method"].ne("default")].assign(nll=9.0)
    others = pd.concat([losses, more.assign(window=more["window"] + 100)])
    assert repr(sentences.quality(others, pd.DataFrame(), "default", "a")) == text
    absent = sentences.quality(losses, pd.DataFrame(), "another", "a")
    assert absent.short == "another has not been measured on a pretrained model."
    noisy = losses["method"].eq("heapr") & losses["window"].eq(1)
    noise = losses.assign(nll=losses["nll"].where(~noisy, 1.7))  # 0.4 and −0.3
    text = repr(sentences.quality(noise, pd.DataFrame(), "default", "a"))
    assert "default avoids no share that is known on a of the Δloss" in text
