"""Push a checkpoint to a repository of the hub, once it has what that needs."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from heapr_lab import hub
from heapr_lab.checkpoints.hub_checks import ERROR, Finding, findings
from heapr_lab.errors import SpecError


def check_repository(name: str) -> None:
    """Check that a repository can have this name.

    Raises:
        SpecError: it cannot.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise SpecError(f"{name!r} is no name of a repository: {error}") from error
    if name.count("/") != 1:
        raise SpecError(f"{name!r} has no owner: give OWNER/NAME")


def refuse_errors(found: Iterable[Finding]) -> None:
    """Check that no finding is an error.

    Raises:
        SpecError: some are; they are counted, and the first is named.
    """
    wrong = [one for one in found if one.level == ERROR]
    if wrong:
        raise SpecError(
            f"{len(wrong)} of the checks failed, nothing was pushed; the first is "
            f"{wrong[0].check}: {wrong[0].text}"
        )


def publish(
    folder: Path | str,
    repository: str,
    *,
    public: bool = False,
    load: bool = True,
    api: Callable[[], Any] = HfApi,
) -> str:
    """Check a checkpoint, and push its files to a repository of the hub.

    Args:
        folder: with a pruned checkpoint.
        repository: its name, OWNER/NAME; made if it does not exist.
        public: whether everybody sees a repository that is made.
        load: whether it is loaded first, in a process of its own.
        api: makes the client of the hub, which has the token.

    Returns:
        The address of the commit.

    Raises:
        SpecError: a check failed, or the hub cannot be reached or refuses.
    """
    check_repository(repository)
    refuse_errors(findings(Path(folder), load=load))
    return push(Path(folder), repository, public=public, api=api)


def push(
    folder: Path,
    repository: str,
    *,
    public: bool,
    api: Callable[[], Any] = HfApi,
) -> str:
    """Push a folder that was checked; the address of the commit.

    Raises:
        SpecError: the hub cannot be reached, or refuses.
    """
    if not hub.answers():
        raise SpecError("the hub cannot be reached, so nothing was pushed")
    try:
        client = api()
        client.create_repo(repository, private=not public, exist_ok=True)
        done = client.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Add a checkpoint pruned by heapr_lab",
        )
    except (HfHubHTTPError, OSError) as error:
        raise SpecError(
            f"the hub did not take {folder} as {repository}: {error}. Log in with "
            "`hf auth login`; what was uploaded is not uploaded again"
        ) from error
    return str(done.commit_url)
