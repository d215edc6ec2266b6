"""What the tests of passages start from."""

import pytest
from tiny_folder import write_model, write_text

from heapr_lab.panel.session import PruningSession
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import open_workbench


@pytest.fixture(scope="session")
def reading(tmp_path_factory: pytest.TempPathFactory) -> PruningSession:
    """A tiny model on a bench, measured on a text."""
    folder = tmp_path_factory.mktemp("reading")
    write_model(folder / "moe")
    write_text(folder / "text.txt", n_texts=60)
    bench = open_workbench(str(folder / "moe"), profile="small")
    calibration = Calibration(str(folder / "text.txt"))
    table = bench.importance(calibration)
    return PruningSession(table, workbench=bench, calibration=calibration)
