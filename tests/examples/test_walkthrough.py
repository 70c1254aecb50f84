"""docs/walkthrough.md links to the present lines of examples/minimal.py.

`python -m tests.examples.test_walkthrough` writes them into the page.
"""

import ast
import re

from tests.paths import ROOT

PAGE, SOURCE = ROOT / "docs/walkthrough.md", ROOT / "examples/minimal.py"
LINK = re.compile(r"\[`(\w+)`\]\(\.\./examples/minimal\.py#L\d+-L\d+\)")


def with_lines(text: str) -> str:
    """The page with the present lines of each function or class that it links to."""
    nodes = [node for node in ast.parse(SOURCE.read_text("utf-8")).body if hasattr(node, "name")]
    lines = {node.name: f"#L{node.lineno}-L{node.end_lineno}" for node in nodes}
    return LINK.sub(lambda link: f"[`{link[1]}`](../examples/minimal.py{lines[link[1]]})", text)


def test_every_link_to_the_page_names_the_lines_of_its_function():
    text = PAGE.read_text("utf-8")
    assert len(LINK.findall(text)) == 10
    assert with_lines(text) == text


def test_the_page_has_at_most_350_lines_and_imports_only_what_it_says():
    source = SOURCE.read_text("utf-8")
    assert len(source.splitlines()) <= 350
    ours = set(re.findall(r"^from (prompt_r1\S*) import", source, re.MULTILINE))
    assert ours == {
        "prompt_r1.metrics.em_f1",
        "prompt_r1.miniworld",
        "prompt_r1.miniworld.agent",
        "prompt_r1.types",
    }


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text("utf-8")), "utf-8")
