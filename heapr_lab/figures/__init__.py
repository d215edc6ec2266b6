"""Tables to data frames to Axes to files: every figure and table, without torch.

Each figure has a data function that returns a tidy frame (`boundary_data`), a plot
function that draws the frame on one Axes and returns it (`plot_boundary`), and a figure
function that lays out all panels with one legend (`figure_boundary`). Each table has a
data function and a `..._table` function that formats the rows for readers.
`save_figure` and `write_table` write files; the same input gives the same bytes.
"""

from heapr_lab.figures.boundary import boundary_data, figure_boundary, plot_boundary
from heapr_lab.figures.comparisons import (
    calibration_size_data,
    figure_calibration_size,
    figure_granularity,
    figure_main,
    figure_scope,
    granularity_data,
    main_data,
    main_table,
    plot_calibration_size,
    plot_comparison,
    scope_data,
    summary_table,
)
from heapr_lab.figures.curves import paper_table
from heapr_lab.figures.files import rows_text, save_figure, write_table
from heapr_lab.figures.masks import (
    figure_layer_ratios,
    figure_mask_diff,
    layer_ratios_data,
    mask_diff_data,
    plot_layer_ratios,
    plot_mask_diff,
)
from heapr_lab.figures.scores import bins_data, figure_bins, plot_bins
from heapr_lab.figures.style import STYLE_FILE, look, styled
