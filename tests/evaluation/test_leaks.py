"""Test questions that were trained or validated on are counted before any call is made."""

import evaluate
from prompt_r1.agent.names import AgentSpec
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.data.files import DAPO_CLOSING, DAPO_OPENING, write_questions
from prompt_r1.evaluation.systems import leak_warnings, training_files
from prompt_r1.types import Question

QUESTIONS = [
    Question("1", "DAPO-Math", f"{DAPO_OPENING}Find $x$.{DAPO_CLOSING}", ("1",), "math"),
    Question("2", "DAPO-Math", "Find $y$.", ("1",), "math"),
    Question("3", "PopQA", "Who is  Anna?", ("Bob",)),
    Question("4", "PopQA", "Who is Bob?", ("Anna",)),
]


def test_the_warning_counts_the_shared_questions_by_dataset(tmp_path):
    """They may differ in case, blanks and DAPO's wrapper. Five of the 1,536 published test questions are in
    the published validation file."""
    trained_on = [Question(text, "x", text, ("?",)) for text in ("find $x$.", "Who is Anna?", "Where?")]
    write_questions(tmp_path / "train.jsonl", trained_on)
    write_questions(tmp_path / "other.jsonl", [Question("a", "x", "Where?", ("?",))])
    files = [str(tmp_path / name) for name in ("train.jsonl", "other.jsonl", "gone.jsonl")]
    shared, missing = leak_warnings(QUESTIONS, ["mini", "mini:ood", "reasoning_gym:chain_sum", *files])
    assert shared.startswith("Warning: 2 of the 4 test questions also occur in")
    assert "train.jsonl (DAPO-Math 1, PopQA 1)" in shared
    assert "gone.jsonl contains test questions was not checked" in missing


def test_the_files_of_agents_and_methods_are_compared(tmp_path):
    config = EvaluateConfig(train_data=("a.jsonl",), val_data=("b.jsonl",))
    assert training_files(config, {"agent": AgentSpec(tmp_path, None, "")}) == ["a.jsonl", "b.jsonl"]


def test_an_evaluation_prints_and_keeps_the_warning(tmp_path, capsys):
    test, validation = tmp_path / "test.jsonl", tmp_path / "validation.jsonl"
    write_questions(test, QUESTIONS)
    write_questions(validation, QUESTIONS[3:])
    out = tmp_path / "out"
    line = ["--method", "direct", "--env", "mini", "--data", test, "--val-data", validation, "--out", out]
    evaluate.main([str(part) for part in line])
    sentence = "Warning: 1 of the 4 test questions also occur in"
    assert sentence in capsys.readouterr().err
    assert sentence in (out / "results.md").read_text() and sentence in (out / "tables.md").read_text()
