"""Draw the benchmarks from their committed results, and fill the pages that show them.

    python -m benchmarks.publish

`make publish` runs it after `heapr-lab reproduce --publish`, whose tables of claims and
savings the READMEs show, too. Nothing is measured.
"""

from pathlib import Path

import pandas as pd

from benchmarks import advice, questions, readme
from benchmarks.index import BENCHMARKS, Benchmark, measured
from heapr_lab.figures.files import draw_files
from heapr_lab.storage import paths


def draw(row: Benchmark, data: pd.DataFrame, folder: Path) -> list[Path]:
    """Write the figure of a benchmark, the rows it shows, and its table.

    Args:
        row: a benchmark that has a figure.
        data: its data, from `index.measured`.
        folder: where the files are written.
    """
    assert row.figure is not None
    return draw_files(
        data,
        row.figure,
        folder / row.stem,
        table_of=row.table,
        provenance={"source": row.results},
    )


def committed(name: str) -> pd.DataFrame:
    """The committed table `claims` or `summary` of the lab model."""
    return pd.read_csv(paths.figures_dir() / f"0_{name}_table.csv")


def main() -> None:
    """Draw, then fill the blocks."""
    data = measured()
    for name, row in BENCHMARKS.items():
        if row.figure is not None:
            draw(row, data[name], paths.figures_dir())
    claims, summary = committed("claims"), committed("summary")
    claimed = readme.claims_table(claims, data)
    front = readme.front_blocks(claimed, data)
    readme.fill_blocks(paths.project_dir() / "README.md", front)
    advised = {name: readme.as_block(table) for name, table in advice.tables().items()}
    readme.fill_blocks(
        paths.project_dir() / "docs" / "when_not.md", advised | advice.sentences()
    )
    table = readme.folded(readme.main_table())
    readme.fill_blocks(
        paths.project_dir() / "docs" / "comparing.md", {"main_table": table}
    )
    readme.fill_blocks(
        paths.project_dir() / "docs" / "claims.md", readme.claims_blocks(claimed, data)
    )
    answers = questions.blocks(questions.Committed(summary, claims, data))
    readme.fill_blocks(paths.figures_dir() / "README.md", answers)
    page = paths.project_dir() / "benchmarks" / "README.md"
    readme.fill_sections(page, readme.sections(data))


if __name__ == "__main__":
    main()
