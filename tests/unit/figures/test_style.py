"""One look: the house style, colours by name, type that can be read."""

import matplotlib as mpl
import matplotlib.pyplot as plt
from figure_rows import evaluation_rows, keep_of, saving_rows
from matplotlib.axes import Axes
from matplotlib.text import Text

from heapr_lab import figures
from heapr_lab.figures import style
from heapr_lab.importance.estimators import ESTIMATORS


def test_the_style_ends_with_the_figure():
    """Plotting leaves the caller's settings alone, and never draws on their Axes."""
    before = dict(mpl.rcParams)
    _, theirs = plt.subplots()
    ax = figures.plot_layer_ratios(figures.layer_ratios_data({0.5: keep_of(7, 3)}))
    assert dict(mpl.rcParams) == before
    assert ax is not theirs
    assert not theirs.has_data()
    data = figures.layer_ratios_data({0.5: keep_of(7, 3)})
    assert figures.plot_layer_ratios(data, ax=theirs) is theirs


def test_estimators_look_different_from_each_other():
    """No two of the tables share a colour or a marker; a name always looks the same."""
    names = [name for name, estimator in ESTIMATORS.items() if not estimator.extra_pass]
    looks = [figures.look(name) for name in names]
    assert len({shown.color for shown in looks}) == len(names) == 7
    assert len({shown.marker for shown in looks}) == len(names)
    assert figures.look("of my own") == figures.look("of my own")


def test_type_is_readable_at_readme_width():
    """Figures are 7 inches wide and no text is below 8 points."""
    data = figures.boundary_data(evaluation_rows(), saving_rows())
    figure = figures.figure_boundary(data)
    assert figure.get_size_inches()[0] == 7
    texts = figure.findobj(mpl.text.Text)
    assert min(text.get_fontsize() for text in texts if text.get_text()) >= 8


def test_names_are_no_formulas():
    """The legend of such labels can be drawn."""
    figure = style.figure_of([1], lambda n, ax: ax.plot([n], label="$x^^2$"))
    figure.draw_without_rendering()
    assert len(figure.legends) == 1


def test_the_legend_stands_where_a_panel_is_missing():
    """With five panels in two rows it takes the sixth place; with six, it is below."""

    def top_of_legend(count: int) -> float:
        figure = style.figure_of(range(count), lambda n, ax: ax.plot([n], label="a"))
        figure.draw_without_rendering()
        (legend,) = figure.legends
        return float(legend.get_window_extent().y1 / figure.bbox.height)

    assert top_of_legend(5) > 0.2 > top_of_legend(6)


def named(points: dict[str, tuple[float, float]]) -> Axes:
    """An Axes from 0 to 1 with these points, and their names."""
    ax = style.own_axes(None)
    ax.plot(*zip(*points.values(), strict=True), "o")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    style.name_points(ax, points)
    return ax


def test_names_of_near_points_do_not_overlap():
    """Four points at nearly one place: each name is free of the others."""
    points = {str(n): (0.5 + 0.001 * n, 0.5) for n in range(4)}
    ax = named(points)
    ax.figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in ax.texts]
    assert [text.get_text() for text in ax.texts] == list(points)
    assert not any(box.count_overlaps(boxes[:n]) for n, box in enumerate(boxes))
    far = [max(map(abs, text.xyann)) > 5 for text in ax.texts]
    assert [text.arrow_patch is not None for text in ax.texts] == far


def test_a_name_stays_inside_the_axes():
    """Beside a point in the upper right corner it is to the left, below the edge."""
    ax = named({"of another model": (1, 0.95)})
    (name,) = ax.texts
    box = Text.get_window_extent(name)
    assert ax.bbox.contains(*box.min)
    assert ax.bbox.contains(*box.max)
