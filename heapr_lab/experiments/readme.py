"""What a reproduction found, in words and tables: claims checked, README filled in."""

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.experiments.claims import results_of_method
from heapr_lab.figures.files import table_markdown
from heapr_lab.pruning.savings import at_context

SUMMARY_RATIOS = (0.0, 0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.8)


def summary_table(results: pd.DataFrame, savings: pd.DataFrame) -> pd.DataFrame:
    """Perplexities, accuracy and savings of the paper's method over the ratios.

    Args:
        results: evaluation rows, the dense model's among them.
        savings: parameters and FLOPs saved per setting.
    """
    ours = results_of_method(results, "heapr")
    dense = results[results["estimator"].eq("dense")]
    rows = pd.concat([dense, ours])
    rows = rows[rows["metric"].isin(["perplexity", "accuracy"])]
    rows = rows[rows["ratio"].isin(SUMMARY_RATIOS)].drop_duplicates(
        ["ratio", "dataset", "metric"]
    )
    label = rows["metric"] + " " + rows["dataset"]
    order = list(dict.fromkeys(label))
    values = rows.assign(label=label).pivot(
        index="ratio", columns="label", values="value"
    )[order]
    saved = (
        results_of_method(savings, "heapr").drop_duplicates("ratio").set_index("ratio")
    )
    shares = ["parameter_reduction", "flops_reduction", "routed_flops_reduction"]
    joined = values.join(saved[shares])
    joined[shares] = joined[shares].fillna(0.0)
    (context,) = set(saved["seq_len"].map(at_context))
    names = {
        "parameter_reduction": "parameters saved",
        "flops_reduction": f"FLOPs saved {context}",
        "routed_flops_reduction": "routed FLOPs saved",
    }
    return joined.rename(columns=names).reset_index()


def fill_blocks(path: Path, blocks: Mapping[str, str]) -> None:
    """Write each block between `<!-- name -->` and `<!-- end -->` of a text file.

    Raises:
        SpecError: the file lacks one of the blocks.
    """
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        parts = re.split(
            rf"<!-- {name} -->.*?<!-- end -->", text, maxsplit=1, flags=re.DOTALL
        )
        if len(parts) != 2:
            raise SpecError(f"{path} has no block '<!-- {name} --> … <!-- end -->'")
        head, tail = parts
        text = f"{head}<!-- {name} -->{block}<!-- end -->{tail}"
    path.write_text(text, encoding="utf-8")


def as_block(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table on lines of its own."""
    return f"\n{table_markdown(frame).strip()}\n"
