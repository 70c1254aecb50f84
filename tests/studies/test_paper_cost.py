"""The costs of the paper's experiments: counted by hand, and as the docs show them."""

import pytest

from prompt_r1.studies import paper_cost
from tests.paths import PUBLISHED, ROOT

FILES = sorted(map(str, PUBLISHED.glob("*.parquet")))


@pytest.mark.skipif(not FILES, reason="the published files are not here")
def test_the_documented_costs_of_the_paper_are_what_the_command_prints(capsys):
    paper_cost.main(FILES)
    table = capsys.readouterr().out
    assert table.strip() in (ROOT / "docs/paper.md").read_text("utf-8")
    # 9 searches: eight datasets, and all of them for the four out of distribution.
    assert f"| opro (gpt-4o-mini) | {9 * (261 + 1600):,} to {9 * (1601 * 261 + 1600):,} | 1,536 |" in table
    assert f"| textgrad (gpt-4o-mini) | {9 * (120 + 13 * 50):,} to" in table
    assert f"| gepa (gpt-4o-mini) | {9 * 150:,} to {9 * (150 + 55 + 17):,} | 1,536 |" in table
