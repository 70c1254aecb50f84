"""One truth for each number: a table that names its results holds no number that is not in them.

A table of the documents whose results were kept follows a comment `<!-- results: NAME … -->`; the results are
what the commands printed, in docs/results/NAME.txt.
"""

import re

import pytest

from tests.paths import ROOT

RESULTS = ROOT / "docs/results"
TABLE = re.compile(r"<!-- results: ([\w -]+) -->\n+((?:\|.*\n)+)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def tables() -> list[tuple[str, str, str]]:
    """The document, the names of the results and the rows of each table."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return [
        (page.name, names, rows)
        for page in sorted(pages)
        for names, rows in TABLE.findall(page.read_text("utf-8"))
    ]


def numbers_of(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in NUMBER.findall(text)}


def label_of(row: str) -> str:
    """The first cell without its marks, up to a comma."""
    return re.sub(r"[*`]", "", row.split("|")[1]).strip().partition(",")[0]


@pytest.mark.parametrize(("page", "names", "rows"), tables())
def test_every_number_of_a_table_is_in_its_results(page, names, rows):
    lines = [
        line for name in names.split() for line in (RESULTS / f"{name}.txt").read_text("utf-8").splitlines()
    ]
    _, _, *rows = rows.splitlines()
    for row in rows:
        own = [line for line in lines if line.startswith("|") and label_of(line) == label_of(row)] or lines
        missing = numbers_of(row.split("|", 2)[2]) - numbers_of("\n".join(own))
        assert not missing, f"{page}: {row}\nhas numbers that are not in docs/results: {sorted(missing)}"


def test_all_results_are_quoted():
    quoted = {name for _, names, _ in tables() for name in names.split()}
    assert quoted == {file.stem for file in RESULTS.glob("*.txt")}
