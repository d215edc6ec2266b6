"""`python -m heapr_lab`: the command line, where `heapr-lab` is not on the path."""

from heapr_lab.cli.app import app

app(prog_name="heapr-lab")
