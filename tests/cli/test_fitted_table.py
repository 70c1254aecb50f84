"""Tables on a terminal: no line is wider than it, and no number is lost without being named."""

from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.cli.fitted_table import fitted_table

HEADER = ["method", "n", "EM", "tokens"]
ROWS = [
    ["direct", "320", "0.188", "12"],
    ["prompt-r1 (runs/mini-seed0)", "320", "0.953 [0.92, 0.97]", "1,234"],
]


def test_a_table_that_fits_has_all_columns_aligned():
    assert fitted_table(HEADER, ROWS, width=80) == (
        "method                         n                  EM  tokens\n"
        "direct                       320               0.188      12\n"
        "prompt-r1 (runs/mini-seed0)  320  0.953 [0.92, 0.97]   1,234"
    )


def test_the_least_important_columns_go_first_and_then_the_name_is_broken():
    assert fitted_table(HEADER, ROWS, drop=["tokens", "n"], width=55).splitlines()[0].split() == [
        "method",
        "n",
        "EM",
    ]
    assert fitted_table(HEADER, ROWS, drop=["tokens", "n"], width=40).splitlines() == [
        "method                                EM",
        "direct                             0.188",
        "prompt-r1             0.953 [0.92, 0.97]",
        "  (runs/mini-seed0)",
    ]  # fmt: skip


@given(
    st.lists(st.tuples(st.text("ab \n|\x1b-", max_size=60), st.text("123.", max_size=9))),
    st.integers(40, 120),
)
def test_no_line_is_wider_than_the_terminal(rows, width):
    lines = fitted_table(["name", "a", "b"], [[name, number, number] for name, number in rows], width=width)
    assert max(map(len, lines.splitlines())) <= width and "\x1b" not in lines
