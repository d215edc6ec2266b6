"""Tables of speed: of sliced experts, of pruned models in vLLM, and of the panel."""

import pandas as pd


def panel_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/latency_browser.py` for readers."""
    named = {
        "table": "table",
        "atoms": "atoms",
        "presses": "key presses",
        "median_ms": "median [ms] ↓",
        "p95_ms": "95 % within [ms] ↓",
    }
    return measured[list(named)].rename(columns=named)


def first_minute_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/first_minute.py` for readers: a row for each step."""
    table = measured.pivot(index=["step", "clicks"], columns="model", values="seconds")
    order = measured[["step", "clicks"]].drop_duplicates()
    table = order.merge(table.reset_index())
    names = {name: f"{name} [s] ↓" for name in measured["model"].unique()}
    return table.rename(columns={"clicks": "clicks until then"} | names)


def speed_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/speed.py` for readers: sliced against the faster dense model.

    Args:
        measured: mode, ratio, method, tokens_per_second, speedup_over_dense,
            predicted_speedup, share_of_predicted and parameter_bytes; `model` if there
            are several.

    Returns:
        A row for each model, mode and ratio.
    """
    rows = measured[measured["method"].eq("sliced")]
    of_all = rows.groupby([c for c in ("model", "mode") if c in rows])
    bytes_before = of_all["parameter_bytes"].transform("max")
    pruned = rows["ratio"].gt(0)
    sliced, bytes_before = rows[pruned], bytes_before[pruned]
    return pd.DataFrame(
        {
            **({"model": sliced["model"]} if "model" in rows else {}),
            "mode": sliced["mode"].str.replace("_", " "),
            "ratio": sliced["ratio"],
            "tokens per second ↑": sliced["tokens_per_second"],
            "÷ dense ↑": sliced["speedup_over_dense"],
            "predicted": sliced["predicted_speedup"],
            "reached of it ↑": sliced["share_of_predicted"],
            "bytes ÷ dense ↓": sliced["parameter_bytes"] / bytes_before,
        }
    ).reset_index(drop=True)


def serving_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows of `benchmarks/serving.py` for readers: each structure against dense.

    Args:
        measured: mode, structure, ratio, speedup_over_dense and share_of_predicted.
    """
    pruned = measured[measured["ratio"].gt(0)]
    columns = {}
    for structure, rows in pruned.groupby("structure", sort=False):
        speeds = rows.set_index(["mode", "ratio"])
        columns[f"{structure} ÷ dense ↑"] = speeds["speedup_over_dense"]
        columns[f"{structure}: of predicted ↑"] = speeds["share_of_predicted"]
    table = pd.DataFrame(columns)
    order = pruned[["mode", "ratio"]].drop_duplicates()
    table = table.loc[list(order.itertuples(index=False, name=None))].reset_index()
    return table.assign(mode=table["mode"].str.replace("_", " "))
