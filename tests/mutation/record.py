"""What mutation testing found, one Markdown file for each module, beside this one."""

import html
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Survivor:
    """A change that no test notices, and why that is right."""

    function: str
    before: str
    after: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What the change is called by."""
        return self.function, self.before, self.after


@dataclass(frozen=True)
class Record:
    """What was found when a module was last tried."""

    late: int
    survivors: tuple[Survivor, ...]


def record_of(path: Path) -> Path:
    """The file with the survivors of a module."""
    return HERE / path.parent.name / f"{path.stem}.md"


def read(path: Path) -> Record:
    """The record of a module; an empty one where there is none."""
    file = record_of(path)
    if not file.exists():
        return Record(0, ())
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    return Record(int(lines[2].split("; ")[1].split()[0]), tuple(map(_survivor, rows)))


def write(path: Path, total: int, late: int, survivors: list[Survivor]) -> str:
    """Write the record of a module; returns a line with its numbers."""
    killed = total - len(survivors)
    numbers = f"{killed} of {total} mutants killed ({killed / max(1, total):.1%})"
    name = path.relative_to(ROOT).as_posix()
    lines = [f"# {name}", "", f"{numbers}; {late} by the time limit.", ""]
    if survivors:
        lines += ["| in | before | after | why it survives |", "|---|---|---|---|"]
        lines += [_row(survivor) for survivor in survivors]
    file = record_of(path)
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return f"{name}: {numbers}, {late} by the time limit"


def _row(survivor: Survivor) -> str:
    code = [_quoted(text) for text in survivor.key]
    return f"| {' | '.join(code)} | {survivor.reason or '?'} |"


def _quoted(text: str) -> str:
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def _survivor(row: str) -> Survivor:
    *code, reason = row.strip("|").split("|")
    function, before, after = (
        html.unescape(cell.strip().removeprefix("<code>").removesuffix("</code>"))
        for cell in code
    )
    return Survivor(function, before, after, reason.strip().removeprefix("?"))
