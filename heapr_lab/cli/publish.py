"""`heapr-lab publish`: check a checkpoint, and push it to a repository of the hub."""

from pathlib import Path
from typing import Annotated

import typer

from heapr_lab.cli import options
from heapr_lab.cli.console import print_facts


def publish(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    repo: Annotated[str, typer.Option(help="The repository, OWNER/NAME.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check only, and push nothing.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="A repository that everybody sees.")
    ] = False,
    load: Annotated[
        bool,
        typer.Option(
            "--load/--no-load", help="Load it first, in a process of its own."
        ),
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Check a checkpoint that `prune` wrote, and push it to the hub.

    Checked are the files, the index, the manifest's checksums, the card, the licence,
    and that it loads in a new process. Nothing is pushed while a check fails.
    """
    from heapr_lab.checkpoints.hub_checks import Finding, findings
    from heapr_lab.checkpoints.publish import check_repository, push, refuse_errors

    check_repository(repo)
    found: list[Finding] = []
    for finding in findings(folder, load=load):
        found.append(finding)
        if not as_json:
            typer.echo(str(finding))
    facts: dict[str, object] = {"repository": repo, "pushed": None}
    if as_json:
        facts["checks"] = [vars(finding) for finding in found]
    if as_json and any(finding.level == "error" for finding in found):
        print_facts(facts, as_json=True)
    refuse_errors(found)
    if not dry_run:
        facts["pushed"] = push(folder, repo, public=public)
    print_facts(facts, as_json=as_json)
