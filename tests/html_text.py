"""What stands in the cells and the marks of a page of HTML."""

import re


def cells(page: str) -> list[list[str]]:
    """The texts of the cells of all tables, row by row."""
    rows = re.findall(r"<tr>(<td.*?)</tr>", page, re.DOTALL)
    table = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [[re.sub("<[^>]*>", "", cell) for cell in row] for row in table]


def marked(page: str) -> list[str]:
    """The texts that are marked."""
    return [re.sub("<[^>]*>", "", part) for part in re.findall("<mark.*?</mark>", page)]
