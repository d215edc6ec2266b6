"""Files: the same bytes for the same figure, with its provenance."""

import math
import os

import pandas as pd
from figure_rows import keep_of
from processes import says

from heapr_lab import figures
from heapr_lab.figures.files import format_column, table_markdown

_DRAW = """
import shutil, sys
from pathlib import Path
from matplotlib import font_manager
folder, of_system = Path(sys.argv[1]), sys.argv[2:]
if of_system:  # the list may have fonts of the system, and not those of matplotlib
    manager = font_manager.fontManager
    fonts = [e for e in manager.ttflist if e.name == "DejaVu Sans"]
    manager.ttflist.clear()
    for path in {e.fname for e in fonts}:
        manager.addfont(shutil.copy(path, folder))
    changed = folder / "DejaVuSans.ttf"
    from fontTools.ttLib import TTFont
    with TTFont(changed) as font:
        font["head"].created += 1
        font.save(changed)
from heapr_lab import KeepMask, figures
from heapr_lab.figures.files import draw_files
data = figures.layer_ratios_data({0.5: KeepMask.from_arrays({0: [[True, False]]})})
draw = figures.figure_layer_ratios
draw_files(data, draw, folder / "bars", provenance={"b": 1, "a": {}})
"""


def test_bytes_do_not_depend_on_the_machine(tmp_path):
    """Another hash seed, folder, configuration and font list, and the same files."""
    folders = []
    for seed, *of_system in (("1",), ("2", "system")):
        folder = tmp_path / seed
        folder.mkdir()
        env = {"PYTHONHASHSEED": seed, "MPLCONFIGDIR": str(folder / "configuration")}
        says("-c", _DRAW, str(folder), *of_system, cwd=folder, env=os.environ | env)
        folders.append(folder)
    for name in ("bars.png", "bars.pdf", "data/bars.csv"):
        first, second = (folder / name for folder in folders)
        assert first.read_bytes() == second.read_bytes(), name


def test_files_carry_the_provenance_and_no_date(tmp_path):
    """PNG and PDF have the provenance; the PDF has no creation date."""
    source = {"spec": "abc"}
    ax = figures.plot_layer_ratios(figures.layer_ratios_data({0.25: keep_of(4, 1)}))
    png, pdf = figures.save_figure(ax.figure, tmp_path / "x", provenance=source)
    text = b'{"spec":"abc"}'
    assert b"Description\x00" + text in png.read_bytes()
    assert text in pdf.read_bytes()
    assert b"CreationDate" not in pdf.read_bytes()
    assert b"/FontFile2" in pdf.read_bytes()  # TrueType (42), not Type 3


def test_tables_are_written_for_programs_and_readers(tmp_path):
    """CSV keeps every digit; Markdown is rounded and escaped."""
    table = pd.DataFrame({"a_b [%] ↓": [28.31494, math.nan], "name": ["x|y", "50 %"]})
    csv, md = figures.write_table(table, tmp_path / "t")
    pd.testing.assert_frame_equal(pd.read_csv(csv), table)
    assert md.read_text(encoding="utf-8").splitlines() == [
        "| a_b [%] ↓ | name |",
        "| ---: | --- |",
        r"| 28.31 | x\|y |",
        "| — | 50 % |",
    ]
    assert table_markdown(table) == md.read_text(encoding="utf-8")


def test_a_column_has_one_number_of_decimals():
    """The median gets four significant digits; whole numbers get no decimals."""
    assert format_column(pd.Series([10.0, 100 * 0.3])) == ["10", "30"]
    assert format_column(pd.Series([0.0, 0.012345])) == ["0.00000", "0.01235"]
    assert format_column(pd.Series([3, None], dtype="Int64")) == ["3", "—"]
