"""The picture of one atomic expert in the matrices of its expert."""

from heapr_lab import figures


def test_an_atomic_expert_is_two_rows_and_a_column() -> None:
    """Atom k owns row k of W_gate and of W_up and column k of W_down, nothing else."""
    data = figures.atomic_expert_data()
    cells = data[data["of_atom"]].groupby("matrix")
    assert cells.size().to_dict() == {"W_down": 6, "W_gate": 6, "W_up": 6, "e_k": 6}
    assert set(cells["row"].unique()["W_gate"]) == {3}
    assert set(cells["row"].unique()["W_up"]) == {3}
    assert set(cells["column"].unique()["W_down"]) == {3}
    sizes = data.groupby("matrix").size()
    assert sizes["W_gate"] == sizes["W_up"] == sizes["W_down"] == 54
    ax = figures.plot_atomic_expert(data)
    text = " ".join(artist.get_text() for artist in ax.texts)
    assert "column $k$ of $W_{\\mathrm{down}}$" in text
