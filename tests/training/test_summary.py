"""The table of steps on the console, and the summary after it."""

import re

import pytest

from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.log import Log, header, step_row
from prompt_r1.training.summary import summary

STEP = {
    "step": 12,
    "reward/mean": 0.5,
    "em": 0.25,
    "format": 1.0,
    "turns": 2.5,
    "kl": 0.0123,
    "games": 80.0,
    "games/s": 40.0,
    "env/usd": 1.5,
    "val/em": 0.75,
    "val/reward": -0.25,
    "val/format": 0.5,
}


def ends_of_words(line: str) -> list[int]:
    """The columns where the labels or numbers of a line end."""
    return [match.end() for match in re.finditer(r"[^\s|:]+", line.replace("| val ", "|     "))]


VALIDATION = {"step": 0, "val/em": 0.5, "val/reward": 0.5, "val/format": 1.0}


@pytest.mark.parametrize(
    ("line", "priced", "shown"),
    [
        (STEP, True, "12 0.500 0.250 1.000 2.50 0.0123 1.5000 | 0.750 -0.250 0.500"),
        (VALIDATION, False, "0 | 0.500 0.500 1.000"),  # a step without games
        (VALIDATION | {"env/usd": 0.25}, True, "0 0.2500 | 0.500 0.500 1.000"),
        (STEP | {"games/s": 181.52}, False, "12 0.500 0.250 1.000 2.50 0.0123 181.5 | 0.750 -0.250 0.500"),
        # The speed of a real model on a CPU was shown as 0.0.
        (STEP | {"games/s": 0.02671}, False, "12 0.500 0.250 1.000 2.50 0.0123 0.02671 | 0.750 -0.250 0.500"),
    ],
)
def test_a_row_shows_the_numbers_of_its_step(line, priced, shown):
    assert step_row(line, priced=priced).split() == shown.split()


@pytest.mark.parametrize("priced", [False, True])
def test_numbers_are_right_aligned_with_their_labels(priced):
    labels, numbers = header(priced=priced), step_row(STEP, priced=priced)
    assert ends_of_words(labels) == ends_of_words(numbers) and len(ends_of_words(labels)) == 7 + 3
    assert labels.index("|") == numbers.index("|") and len(labels) <= 80
    without_games = step_row(VALIDATION | {"env/usd": 0.25}, priced=priced)
    assert labels.index("|") == without_games.index("|")


def test_the_labels_are_repeated_every_25_rows(tmp_path, capsys):
    log = Log(tmp_path)
    for step in range(51):
        log.write_metrics({"step": step})
    printed = capsys.readouterr().out.splitlines()
    assert [number for number, line in enumerate(printed) if line.startswith("step")] == [0, 26, 52]
    assert len(printed) == 54 and printed[1] == "   0"


def test_the_whole_summary_of_a_run(tmp_path):
    """Every line, with commands that can be typed as they stand."""
    shown = summary(tmp_path, 2, TrainConfig(env="mini", test_data=("mini",)))
    assert shown.splitlines() == [
        "Where it is",
        f"  {tmp_path}/report.html: counts, curves and games, to open in a browser",
        f"  {tmp_path}/agent: the agent of step 2, a Hugging Face folder",
        f"  {tmp_path}/metrics.jsonl: the curves; trajectories/: every game",
        f"  {tmp_path}/test.md: the test by dataset",
        "What to type next",
        f"  python infer.py --agent {tmp_path}",
        f"  python evaluate.py --agent {tmp_path} --data mini:ood",
    ]
    empty = summary(tmp_path, 0, TrainConfig(env="model", data=("my own.jsonl",), val_data=("held-out",)))
    assert "test.md" not in empty and "evaluate.py" not in empty, "it advised to test on the training file"
    assert empty.endswith("data split --in 'my own.jsonl' --out train.jsonl --test test.jsonl")
    own = summary(tmp_path, 0, TrainConfig(env="py:my_llm:Oracle", data=("a.csv",), val_data=("b.csv",)))
    assert own.endswith(f"evaluate.py --agent {tmp_path} --env py:my_llm:Oracle --data b.csv")
    assert f"infer.py --agent {tmp_path} --env py:my_llm:Oracle" in own


def test_a_model_whose_name_contains_py_is_not_named_again(tmp_path):
    """A bug: the advice had --env, which only a user's object needs."""
    assert "--env" not in summary(tmp_path, 0, TrainConfig(env="happy:7b@http://h/v1", data=("mini",)))


@pytest.mark.parametrize(
    ("data", "tested"), [("mini", "mini:ood"), ("mini:pop", "mini:pop"), ("py:sums:rows", "py:sums:rows")]
)
def test_questions_that_are_in_no_file_are_not_split(tmp_path, data, tested):
    """A bug: after a run with an environment of one's own, the advice was `split --in mini`, which fails."""
    shown = summary(tmp_path, 1, TrainConfig(env="m@http://127.0.0.1:8000/v1", data=(data,)))
    assert "split" not in shown and shown.endswith(f"evaluate.py --agent {tmp_path} --data {tested}")


def test_a_run_whose_best_agent_is_the_start_says_so(tmp_path):
    """A user asked the agent of a short run, and did not know that it was the untrained one."""
    sentence = "the agent of step 0, a Hugging Face folder; it is not trained"
    assert sentence in summary(tmp_path, 0, TrainConfig(env="mini"))
    assert "not trained" not in summary(tmp_path, 1, TrainConfig(env="mini"))
