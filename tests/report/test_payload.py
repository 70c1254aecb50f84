"""The data of the report, row by row: columns, chosen steps, spans, costs, evaluations."""

import json
import re

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction, System, to_row
from prompt_r1.metrics.statistics import wilson
from prompt_r1.report import page, payload
from prompt_r1.report.payload import RunData, ShownGame
from prompt_r1.report.spans import Span, TokenTexts, spans_of
from prompt_r1.report.verdict import columns, verdict
from prompt_r1.spending import Spending
from prompt_r1.types import Question
from tests.support import tiny
from tests.support.played import group_of, write_run


def test_metrics_become_columns_with_wilsons_interval_of_each_validation():
    """The interval of a line without a validation is not known, nor that of an impossible number."""
    lines = [
        {"step": 0, "val/em": 0.5, "val/format": 1.0, "val/n": 10.0},
        {"step": 1, "kl": "text", "val/n": 10.0},
        {"step": 2, "val/em": 0.26, "val/format": 0.0, "val/n": 10.0, "kl": 1e301},
        {"step": 3, "val/em": 1.04, "val/n": 10.0},
    ]
    table = columns(lines)
    assert table["step"] == [0, 1, 2, 3] and table["kl"] == [None] * 4
    em = [wilson(5, 10), (None, None), wilson(3, 10), wilson(10, 10)]
    assert list(zip(table["val/em_low"], table["val/em_high"], strict=True)) == em
    formed = [wilson(10, 10), (None, None), wilson(0, 10), (None, None)]
    assert list(zip(table["val/format_low"], table["val/format_high"], strict=True)) == formed
    known = columns([{"val/em": 0.5, "val/n": 10.0, "val/em_low": 0.4}])
    assert known["val/em_low"] == [0.4] and "val/em_high" not in known, "the run's own intervals are kept"
    assert "val/em_low" not in columns([{"val/em": 0.5}]) and columns([]) == {}


@pytest.mark.parametrize(
    ("games", "chosen"),
    [
        (1, [9]),
        (19, [9]),
        (20, [1, 9]),
        (30, [1, 5, 9]),
        (89, [1, 2, 3, 4, 6, 7, 8, 9]),
        (90, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_as_many_steps_are_shown_as_games_fit(tmp_path, games, chosen):
    files = {}
    for step in range(9, 0, -1):
        files[step] = [tmp_path / f"{step}-{rank}" for rank in (0, 1)]
        for path in files[step]:
            path.write_text("{}\n" * 5)
    assert payload.choose_steps(files, games=games) == chosen and payload.choose_steps({}, games=games) == []


def test_files_of_many_megabytes_are_not_all_read(tmp_path, monkeypatch):
    """120 MB at most, measured by the last step; the limit is made smaller here."""
    assert payload.MEGABYTES == 120 and page.GAMES == 8000
    monkeypatch.setattr(payload, "MEGABYTES", 1)
    files = {step: [tmp_path / str(step)] for step in (1, 2, 3)}
    for step, size in ((1, 10), (2, 10), (3, 500_000)):
        files[step][0].write_text("x" * (size - 1) + "\n")
    assert payload.choose_steps(files, games=100) == [1, 3]
    files[3][0].write_text("x" * 333_333)
    assert payload.choose_steps(files, games=100) == [1, 2, 3]
    files[3][0].write_text("x" * 2_000_000)
    assert payload.choose_steps(files, games=100) == [3]


def test_the_answers_of_an_evaluation_are_shown_from_the_newest_backwards(tmp_path):
    questions = [Question(f"q{number}", "maths", "Who?", ("Anna",)) for number in range(3)]
    direct = {"system": System("direct", "mini"), "spent": Spending(3, 70, 9, 0.5)}
    rows = [to_row(Prediction(question, "Anna", "So: Anna", **direct)) for question in questions]
    rows.append(to_row(Prediction(questions[2], None, "?", system=System("cot", "mini", "runs/a"))))
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    data = payload.read_run(tmp_path, games=3)
    assert [(group.id, len(group.games)) for group in data.groups] == [("q1", 1), ("q2", 2)]
    first, unanswered = data.groups[1].games
    assert first == ShownGame(
        stop="answered",
        error="",
        answer="Anna",
        right=True,
        spans=[Span("So: Anna")],
        player="direct, mini",
        calls=3,
        usd=0.5,
    )
    assert (unanswered.answer, unanswered.right, unanswered.player) == (None, False, "cot, mini, runs/a")
    assert data == RunData(tmp_path.name, data.groups)
    group = data.groups[0]
    assert (group.opening, group.kind, group.step) == (Span("Who?"), "evaluation", 0)
    assert (group.question, group.answers) == ("Who?", ["Anna"])
    (tmp_path / "predictions.jsonl").write_text('{"question": "Who?"}\n')
    with pytest.raises(UsageError, match="a line is not an answer"):
        payload.read_run(tmp_path, games=3)


def test_test_questions_of_two_datasets_keep_their_own_games_though_their_ids_are_equal(tmp_path):
    run = write_run(tmp_path / "run", [[group_of(Question("1", "a", "Who?", ("Anna",)))]])
    [path] = (run / "trajectories").iterdir()
    row = json.loads(path.read_text().splitlines()[0])
    questions = [
        {**row["question"], "dataset": name, "text": text} for name, text in (("a", "Who?"), ("b", "When?"))
    ]
    for agent in ("untrained", "trained"):
        lines = "".join(
            json.dumps({**row, "group": number, "question": one}) + "\n"
            for number, one in enumerate(questions)
        )
        path.with_name(f"test-{agent}-rank0.jsonl").write_text(lines)
    tests = [group for group in payload.read_run(run, games=9).groups if group.kind == "test"]
    assert [(group.dataset, group.question, len(group.games)) for group in tests] == [
        ("a", "Who?", 2),
        ("b", "When?", 2),
    ]


def test_the_test_games_of_many_ranks_are_shown_in_the_order_of_the_questions(tmp_path):
    run = write_run(tmp_path / "run", [[group_of(Question("1", "a", "Who?", ("Anna",)))]])
    [path] = (run / "trajectories").iterdir()
    row = json.loads(path.read_text().splitlines()[0])
    for rank in range(12):
        line = json.dumps({**row, "question": {**row["question"], "id": str(rank)}}) + "\n"
        path.with_name(f"test-trained-rank{rank}.jsonl").write_text(line)
    tests = [group.id for group in payload.read_run(run, games=9).groups if group.kind == "test"]
    assert tests == list(map(str, range(12)))


def test_the_failed_call_of_a_broken_game_is_shown_too(tmp_path):
    question = Question("q0", "maths", "Who?", ("Anna",))
    run = write_run(tmp_path / "run", [[group_of(question)]])
    [path] = (run / "trajectories").iterdir()
    row = json.loads(path.read_text().splitlines()[0])
    lost = {**row["turns"][0], "reply": None, "latency": 7.0}
    for stop, calls in (("env_error", 2), ("malformed", 1)):
        game = payload._game({**row, "turns": [row["turns"][0], lost], "stop": stop}, [], "")
        assert (game.calls, game.seconds) == (calls, sum([row["turns"][0]["latency"], 7.0][:calls]))


def nats(digits: str, zero: int) -> list[float]:
    return [(int(two, 36) - zero) / 100 for two in re.findall("..", digits)]


def test_log_probabilities_and_ratios_are_two_digits_of_base_36_in_hundredths_of_a_nat():
    tokens = list(tiny.tokenizer()("abcd")["input_ids"])
    row = {
        "tokens": tokens,
        "sampled": "0111",
        "logprobs": [0.0, -0.694, -40.0],
        "log_ratios": [9.0, -0.1, -9.0],
    }
    context, written = spans_of(row, TokenTexts(tiny.tokenizer()))
    assert context == Span("a", 1) and (written.text, written.lengths) == ("bcd", "111")
    assert nats(written.logprobs, 1295) == [0.0, -0.69, -12.95]
    assert nats(written.ratios, 648) == [6.47, -0.1, -6.48]
    [_, unknown] = spans_of({**row, "logprobs": [0.0], "log_ratios": []}, TokenTexts(tiny.tokenizer()))
    assert (unknown.logprobs, unknown.ratios) == ("", "")


@pytest.mark.parametrize("texts", [TokenTexts(tiny.tokenizer()), None])
def test_each_turn_has_the_advantage_of_the_game(texts):
    tokens = list(tiny.tokenizer()("abcd")["input_ids"])
    turns = [{"text": "b", "reply": "c"}, {"text": "d", "reply": None}]
    row = {"question": {"text": "a"}, "turns": turns, "tokens": tokens, "sampled": "0101", "advantage": 0.5}
    spans = spans_of(row, texts)
    assert [span.advantage for span in spans if span.written] == [0.5, 0.5]
    assert all(span.advantage is None for span in spans if not span.written)


@pytest.mark.parametrize(("length", "digit"), [(1, "1"), (10, "a"), (35, "z"), (36, "")])
def test_the_length_of_a_token_is_one_digit_of_base_36(length, digit):
    texts = TokenTexts(tiny.tokenizer())
    texts.text = lambda tokens: "x" * length * len(tokens)
    assert texts.lengths((1,)) == digit


def test_json_has_the_fields_of_records_and_no_character_of_markup():
    assert page.as_json({"a": ["<b> & é\u202e"]}) == '{"a":["\\u003cb\\u003e \\u0026 \\u00e9\\u202e"]}'
    assert json.loads(page.as_json([Span("a", 1)])) == [vars(Span("a", 1))]


def test_a_verdict_needs_ten_trained_steps_where_nothing_was_validated():
    columns = {"reward/mean": [0.5], "em": [0.0] * 5 + [1.0] * 4}
    assert "too early" in verdict(columns).text
    learned = verdict({**columns, "em": [0.0] * 5 + [1.0] * 5})
    assert learned.text == "Learned: EM of the sampled games 0.00 → 1.00 in the last 5 steps."


def test_a_run_without_the_format_is_told_from_one_without_any_difference():
    """At most 5 % of the games have the format; all of the last five steps are without spread."""
    columns = {
        **{"reward/mean": [0.5], "step": [0.0, 20.0], "val/em": [0.0, 0.0], "val/n": [10.0, 10.0]},
        "groups/no_spread": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
    }
    same = "; all games of each question had the same reward, so there was nothing to learn from"
    for formed, end in (
        ([0.9, *[0.049] * 5], ", because almost no game has the required format."),
        ([0.05], "."),
    ):
        text = verdict({**columns, "format": formed}).text
        assert text == f"Did not learn: validation EM 0.00 → 0.00 at step 20 (10 questions){same}{end}"
    assert same not in verdict({**columns, "groups/no_spread": [1.0, 0.9]}).text
