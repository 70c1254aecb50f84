"""pass@k, against the enumeration of all draws."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction, System, to_row
from prompt_r1.metrics.statistics import pass_at_k
from prompt_r1.studies.passes import table
from prompt_r1.types import Question


@pytest.mark.parametrize(("n", "right"), [(6, 0), (6, 1), (6, 4), (6, 6), (3, 2)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n, right, k):
    draws = list(combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def write(folder: Path, answers: int) -> None:
    """Two kinds with a question each: of the first kind every other answer is right, of the second none.

    A failed call and a right answer of older settings come first.
    """
    system = System("untrained", "mini", "mini")
    first, second = (Question(f"{kind}-1", kind, "Who?", ("Anna",)) for kind in ("bridge", "pop"))
    written = [Prediction(second, None, sample=99, error="429"), Prediction(second, "Anna", setting="old")]
    for question, odd in ((first, "anna"), (second, "Bob")):
        written += [Prediction(question, odd if n % 2 else "Bob", sample=n) for n in range(answers)]
    lines = [json.dumps(to_row(replace(one, system=system))) for one in written]
    (folder / "predictions.jsonl").write_text("\n".join(lines) + "\n")


def test_the_table_has_a_row_for_each_kind_and_for_all(tmp_path):
    write(tmp_path, 10)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table([tmp_path]).splitlines()]
    assert cells[0] == ["kind", "method", "pass@1", "pass@5"]
    rows = {kind: values for kind, _, *values in cells[2:]}
    assert rows == {
        "bridge": ["0.500", f"{pass_at_k(10, 5, 5):.3f}"],
        "all": ["0.250", f"{pass_at_k(10, 5, 5) / 2:.3f}"],
        "pop": ["0.000", "0.000"],
    }


def test_several_seeds_are_pooled_though_their_questions_have_equal_ids(tmp_path):
    for seed in ("0", "1"):
        (tmp_path / seed).mkdir()
        write(tmp_path / seed, 10)
    assert table([tmp_path / "0", tmp_path / "1"]) == table([tmp_path / "0"])


def test_single_answers_have_no_pass_at_k(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(
        UsageError, match="1 answers to a question: evaluate with --temperature 1 --repeats 32"
    ):
        table([tmp_path])
