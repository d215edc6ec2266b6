"""What a folder needs before it becomes a repository of the hub: a check for each.

Checks read files and change nothing. A finding is `ok`, a `warning`, which is a matter
of taste or could not be looked up, or an `error`, with which nothing is pushed.
"""

import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from heapr_lab.checkpoints.folder import checksums_in
from heapr_lab.checkpoints.model_card import loading_code
from heapr_lab.checkpoints.save import KEEP_FILE
from heapr_lab.models import ragged_experts
from heapr_lab.models.folders import has_tokenizer, read_config
from heapr_lab.models.loading import free_memory
from heapr_lab.models.memory import gigabytes
from heapr_lab.models.safetensors_headers import INDEX, SINGLE, read_source
from heapr_lab.models.sources import weights_bytes
from heapr_lab.storage import files
from heapr_lab.storage.provenance import MANIFEST_FILE

OK, WARNING, ERROR = "ok", "warning", "error"
CODE = f"{ragged_experts.CODE_NAME}.py"
CARD = "README.md"
EXPECTED = (
    "*.safetensors", INDEX, "config.json", "generation_config.json", CARD, CODE,
    KEEP_FILE, MANIFEST_FILE, "LICENSE*", "LICENCE*", "NOTICE*", ".gitattributes",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "chat_template*", "*processor*.json", "tekken.json", "*.model",
    "*.spm", "*.tiktoken",
)  # fmt: skip
"""Names of the files that belong into a repository."""
_UNPICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
_TAGS = {"mixture-of-experts", "pruning", "heapr"}
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SHARE = 0.8
"""Of the free memory, that loading the model may take."""
_SECONDS = 1800


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    level: str
    """`ok`, `warning` or `error`."""
    text: str
    """What was found and, where it is not as it should be, what to do."""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.check}: {self.text}"


def findings(folder: Path, *, load: bool = True) -> Iterator[Finding]:
    """Check a folder that `heapr-lab prune` wrote, or `save_pruned`.

    Args:
        folder: the checkpoint.
        load: also load it in a process of its own, which takes the longest.
    """
    checks = dict(_CHECKS)
    if not load:
        del checks["loads"]
    for name, check in checks.items():
        try:
            found = list(check(folder))
        except Exception as error:  # a damaged file may cause any of them
            found = [(ERROR, " ".join(str(error).split()))]
        yield from (Finding(name, level, text) for level, text in found)


Found = Iterator[tuple[str, str]]
"""Level and text of each finding."""


def _manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = files.read_json(folder / MANIFEST_FILE)
    return found


# --- files ------------------------------------------------------------------------


def _files(folder: Path) -> Found:
    """Nothing but what belongs there."""
    strays = [
        path.relative_to(folder)
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not _belongs(path, folder)
    ]
    for path in strays:
        pickled = any(fnmatch.fnmatch(path.name, name) for name in _UNPICKLED)
        why = ", which runs code when it is read," if pickled else ""
        yield ERROR, f"{path}{why} is no file of a checkpoint: remove it"
    if not strays:
        n_files = sum(path.is_file() for path in folder.iterdir())
        yield OK, f"{n_files} files, all of a checkpoint"


def _belongs(path: Path, folder: Path) -> bool:
    known = any(fnmatch.fnmatch(path.name, name) for name in EXPECTED)
    return path.is_file() and path.parent == folder and known


def _weights(folder: Path) -> Found:
    """Every tensor where the index says, in every file, and as it was written."""
    stored, index = read_source(folder)
    if index is not None:
        here = {name for own in stored.values() for name in own}
        unlisted = sorted(here - index["weight_map"].keys())
        if unlisted:
            yield (
                ERROR,
                f"{INDEX} does not name {unlisted[0]}, which is in a file beside it: "
                "save the checkpoint again",
            )
            return
    beside = {p.name for p in folder.glob("*.safetensors")} - {p.name for p in stored}
    if beside:
        others = "the index does not name" if index else f"are beside {SINGLE}"
        yield ERROR, f"there are files that {others}: {', '.join(sorted(beside))}"
        return
    n_tensors = sum(map(len, stored.values()))
    yield OK, f"{n_tensors} tensors in {len(stored)} files, {_size(folder)}"


def _size(folder: Path) -> str:
    return gigabytes(weights_bytes(folder))


def _checksums(folder: Path) -> Found:
    """The files are those that the manifest was written with."""
    said, found = _manifest(folder)["sha256"], checksums_in(folder)
    wrong = sorted(name for name in said | found if said.get(name) != found.get(name))
    if wrong:
        yield (
            ERROR,
            f"{wrong[0]} is not the file that {MANIFEST_FILE} was written with: save "
            "the checkpoint again, so that card and manifest are of these weights",
        )
        return
    yield OK, f"{len(found)} files as {MANIFEST_FILE} has them"


def _config(folder: Path) -> Found:
    """Configuration and tokenizer."""
    config = read_config(folder)
    yield OK, f"{config.model_type}, {(config.architectures or ['no class'])[0]}"
    if has_tokenizer(folder):
        yield OK, "there is a tokenizer"
    else:
        yield ERROR, "there is no tokenizer: copy the base model's files there"


def _code(folder: Path) -> Found:
    """The module that a checkpoint without heapr_lab runs is ours, unchanged."""
    path = folder / CODE
    if not path.is_file():
        yield OK, "no code comes with it"
    elif _is_ours(path):
        yield OK, f"{CODE} is that of this version of heapr_lab"
    else:
        yield (
            WARNING,
            f"{CODE} is another than that of this version of heapr_lab, and was not "
            "run: save the checkpoint again, unless an earlier version wrote it",
        )


def _is_ours(path: Path) -> bool:
    return path.read_bytes() == Path(ragged_experts.__file__).read_bytes()


def _private(folder: Path) -> Found:
    """Nothing in texts that is of this machine."""
    home, place = Path.home(), folder.resolve().parent
    marks = [str(home)] if len(home.parts) > 1 else []
    marks += [str(place)] if len(place.parts) > 2 else []  # else words match
    named = [
        path.name
        for path in (folder / CARD, folder / MANIFEST_FILE, folder / "config.json")
        if path.is_file() and any(mark in path.read_text("utf-8") for mark in marks)
    ]
    for name in named:
        yield WARNING, f"{name} names a folder of this machine: replace it"
    if not named:
        yield OK, "no folder of this machine is named"


# --- the card and the licence -------------------------------------------------------


def _card(folder: Path) -> Found:
    """What the hub shows and searches for."""
    data = _front_matter(folder)
    if data is None:
        yield ERROR, f"there is no {CARD} with front matter: save the checkpoint again"
        return
    base = data.base_model
    if not isinstance(base, str) or not base:
        yield ERROR, f"{CARD} names no base_model: add its repository, OWNER/NAME"
    elif not _REPOSITORY.fullmatch(base):
        yield WARNING, f"base_model {base!r} is no repository of the hub, OWNER/NAME"
    if not data.license:
        yield ERROR, f"{CARD} names no license: add that of the base model"
    if data.library_name != "transformers":
        yield ERROR, f"{CARD} has library_name {data.library_name!r}: transformers"
    missing = sorted(_TAGS - set(data.tags or ()))
    if missing:
        yield WARNING, f"{CARD} has no tags {', '.join(missing)}"
    if "perplexity" not in _manifest(folder):
        yield WARNING, "nothing was measured: --perplexity CORPUS of prune does"
    yield OK, f"{CARD} has front matter, licence {data.license or 'none'}"


def _front_matter(folder: Path) -> ModelCardData | None:
    path = folder / CARD
    if not path.is_file():
        return None
    data = ModelCard.load(path, ignore_metadata_errors=True).data
    return data if data.to_dict() else None


def _licence(folder: Path) -> Found:
    """The text of the licence comes along, where the base has one."""
    own = [path.name for path in folder.glob("LICEN[SC]E*")]
    if own:
        yield OK, f"{own[0]} is there"
        return
    base = _manifest(folder).get("base_model") or ""
    text = _licence_of(base)
    if text is None:
        yield WARNING, f"the licence of {base or 'the base'} is not on this machine"
    else:
        yield ERROR, f"{base} has {text.name}, the checkpoint has none: copy {text}"


def _licence_of(base: str) -> Path | None:
    """The text of a base model's licence, if its repository is in the hub's cache."""
    if not _REPOSITORY.fullmatch(base):
        return None
    found = (try_to_load_from_cache(base, name) for name in _LICENCES)
    return next((Path(path) for path in found if isinstance(path, str)), None)


# --- loading ------------------------------------------------------------------------

_LOAD = """
import json, sys, torch
{blocked}
{code}
model, info = model if isinstance(model, tuple) else (model, {{}})
holes = sorted(map(str, sum(map(list, info.values()), [])))
ids = torch.arange(8)[None] % model.config.get_text_config().vocab_size
with torch.inference_mode():
    logits = model(ids).logits
print(json.dumps([type(model).__name__, model.num_parameters(),
                  bool(logits.isfinite().all()), holes]))
"""
"""transformers fills in what a file lacks at random, so it is asked for the names."""


def _loads(folder: Path) -> Found:
    """As the card says, in a process that has imported nothing yet."""
    needed, free = weights_bytes(folder), free_memory("cpu")
    if needed > _SHARE * free:
        yield (
            WARNING,
            f"not loaded: it needs {gigabytes(needed)}, {gigabytes(free)} are free",
        )
        return
    code = loading_code(folder.resolve())
    if ".from_pretrained(" in code:
        code = f"{code[:-1]}, output_loading_info=True)"
    yield _run(_LOAD.format(blocked="", code=code), "as the card says")
    path = folder / CODE
    if path.is_file() and _is_ours(path):
        remote = code.replace("import heapr_lab\n", "")
        remote = f"{remote[:-1]}, trust_remote_code=True)"
        blocked = "sys.modules['heapr_lab'] = None"
        said = "without heapr_lab, running its own code"
        yield _run(_LOAD.format(blocked=blocked, code=remote), said)


def _run(code: str, how: str) -> tuple[str, str]:
    """Run Python in a new process without the network."""
    with tempfile.TemporaryDirectory() as place:
        own = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": place}
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=place, env=os.environ | own,
                capture_output=True, text=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return ERROR, f"it does not load {how} within {_SECONDS} seconds"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return ERROR, f"it does not load {how}: {why}"
    name, n_parameters, finite, holes = json.loads(lines[-1])
    if holes:
        return ERROR, (
            f"loaded {how}, {len(holes)} tensors are missing, have another shape or "
            f"belong to no module, {holes[0]} the first: save the checkpoint again"
        )
    if not finite:
        return ERROR, f"loaded {how}, its logits are not finite: measure it again"
    return OK, f"loads {how}: {name}, {n_parameters:,} parameters"


_CHECKS: dict[str, Callable[[Path], Found]] = {
    "files": _files,
    "weights": _weights,
    "checksums": _checksums,
    "config": _config,
    "code": _code,
    "card": _card,
    "licence": _licence,
    "private": _private,
    "loads": _loads,
}
