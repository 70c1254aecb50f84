"""The report holds the data of the run's files, hostile texts stay data, and the page loads nothing."""

import base64
import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.errors import UsageError
from prompt_r1.metrics.statistics import wilson
from prompt_r1.report.__main__ import main
from prompt_r1.report.page import as_json, write_report
from prompt_r1.report.payload import is_right
from prompt_r1.report.spans import Span, TokenTexts, spans_of
from prompt_r1.reward import RULES, score
from prompt_r1.spending import Spending
from prompt_r1.storage.run_log import Log
from prompt_r1.types import Question, ScoredGame
from tests.support import tiny
from tests.support.played import HOSTILE, group_of, play_game, write_run
from tests.support.tiny import think


def question(number: int = 0) -> Question:
    return Question(f"q{number}", "maths", f"Who is number {number}?", ("Anna",))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two steps of two questions with four games each."""
    groups = [group_of(question(number)) for number in range(4)]
    return write_run(tmp_path_factory.mktemp("runs") / "run", [groups[:2], groups[2:]])


def data_of(path: Path) -> list[dict]:
    """The data of a page, as its script reads it: one or two runs."""
    html = path.read_text("utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def rows_of(run: Path) -> list[dict]:
    files = sorted((run / "trajectories").iterdir())
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def test_a_number_that_javascript_cannot_read_is_not_written():
    """NaN in the data would leave the page empty; the payload replaces it before."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"loss": math.nan})


def test_the_page_holds_the_data_of_the_run_folder(run):
    [shown] = data_of(write_report(run))
    games = [game for group in shown["groups"] for game in group["games"]]
    rows = rows_of(run)
    assert len(games) == len(rows) == 16 and [group["step"] for group in shown["groups"]] == [1, 1, 2, 2]
    tokenizer = tiny.tokenizer()
    for group in shown["groups"]:
        for game in group["games"]:
            row = rows.pop(0)
            asked_of = row["question"]
            assert (group["question"], group["answers"]) == (asked_of["text"], asked_of["answers"])
            for name in ("stop", "error", "answer", "reward", "advantage"):
                assert game[name] == row[name]
            spans = [group["opening"], *game["spans"]]
            assert "".join(span["text"] for span in spans) == tokenizer.decode(row["tokens"])
            mask = "".join(str(int(span["written"])) * span["tokens"] for span in spans)
            assert mask == row["sampled"]
            asked = [turn["latency"] for turn in row["turns"] if turn["reply"] or game["error"]]
            assert (game["calls"], game["seconds"]) == (len(asked), sum(asked))
            replies = [span["seconds"] for span in game["spans"] if not span["written"]]
            assert replies == asked[: len(replies)]
    assert shown["metrics"]["reward/mean"][0] is None and shown["metrics"]["turns"] == [None, 2.0, 2.0]
    assert shown["metrics"]["kl"] == [None] * 3  # JSON has no NaN
    assert (shown["metrics"]["val/em_low"][0], shown["metrics"]["val/em_high"][0]) == wilson(1, 10)
    assert shown["epsilon"] == 1.0 and shown["settings"]["rule"] == "release"


def test_each_token_of_the_agent_has_its_length_its_log_probability_and_its_ratio(run):
    [shown] = data_of(write_report(run))
    written = [span for game in shown["groups"][0]["games"] for span in game["spans"] if span["written"]]
    assert len(written) == 7
    for span in written:
        assert len(span["lengths"]) == span["tokens"]
        assert sum(int(digit, 36) for digit in span["lengths"]) == len(span["text"])
        assert {int(two, 36) - 1295 for two in re.findall("..", span["logprobs"])} == {-50}
        if span["advantage"] is not None:  # it was trained on
            assert len(span["ratios"]) == 2 * span["tokens"]
            assert {int(two, 36) - 648 for two in re.findall("..", span["ratios"])} == {18}  # log 1.2


def test_a_character_of_several_tokens_is_shown_once():
    """Every byte is a token of the tiny tokenizer, so "é" has two tokens that are no text on their own."""
    tokens = tiny.tokenizer()("né")["input_ids"]
    row = {"tokens": tokens, "sampled": "1" * len(tokens), "logprobs": [-3.0] * len(tokens)}
    assert spans_of(row, TokenTexts(tiny.tokenizer())) == [Span("né", 3, written=True, logprobs="rn" * 3)]


def test_a_run_without_a_saved_agent_is_shown_with_its_recorded_texts(run, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    (tmp_path / "trajectories").mkdir()
    for path in (run / "trajectories").iterdir():
        incomplete = path.read_bytes() + b'{"group": 9, "que'  # cut short by a kill
        (tmp_path / "trajectories" / path.name).write_bytes(incomplete)
    [shown] = data_of(write_report(tmp_path))
    asking, answering = rows_of(run)[0]["turns"]
    spans = shown["groups"][0]["games"][0]["spans"]
    assert [span["text"] for span in spans] == [asking["text"], asking["reply"], answering["text"]]
    assert len(shown["groups"]) == 4


def test_hostile_texts_are_complete_and_never_markup(tmp_path):
    texts = [*HOSTILE, "lone \ud800 surrogate", "long " * 20_000]
    groups = [
        group_of(Question(f"q{n}", text[:50], text, ("Anna", text[:80])), reply=text)
        for n, text in enumerate(texts)
    ]
    path = write_report(write_run(tmp_path / "hostile", [groups]))
    html = path.read_text("utf-8")
    page = write_report(write_run(tmp_path / "empty", [])).read_text("utf-8")
    assert html.count("<script") == page.count("<script") == 2
    assert html.count("<") == page.count("<") and html.count("</") == page.count("</")
    assert "\0" not in html and "\u202e" not in html and "\u2028" not in html
    [shown] = data_of(path)
    assert [group["question"] for group in shown["groups"]] == texts
    for group, text in zip(shown["groups"], texts, strict=True):
        known = text.encode("utf-8", "replace").decode()
        known = known.replace("</interaction_response", "&lt;/interaction_response")
        assert known in group["games"][0]["spans"][1]["text"]


def test_the_page_loads_nothing_and_runs_only_its_own_script(run):
    html = write_report(run).read_text("utf-8")
    data = re.search(r'id="data">(.*?)</script>', html, re.S)[1]
    page = html.replace(data, "").replace("http://www.w3.org/2000/svg", "")  # a namespace, not a link
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|innerHTML|\beval\(|document\.write", page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)[1]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for kind, pattern in (("style", r"<style>(.*?)</style>"), ("script", r"<script>(.*)</script>")):
        digest = hashlib.sha256(re.search(pattern, html, re.S)[1].encode()).digest()
        assert f"{kind}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_a_page_can_show_two_runs(run, tmp_path):
    path = write_report(run, run, out=tmp_path / "both.html")
    assert [shown["name"] for shown in data_of(path)] == ["run", "run"]
    other = shutil.copytree(run, tmp_path / "other")
    assert write_report(run, other) == run / "report-with-other.html"


def test_the_groups_of_all_ranks_are_in_the_order_of_their_questions(tmp_path):
    """Each of two ranks plays every second question, and numbers the groups in its own file."""
    run = write_run(tmp_path / "run", [[group_of(question(number)) for number in range(4)]])
    [path] = (run / "trajectories").iterdir()
    rows = rows_of(run)
    assert [row["question"]["id"] for row in rows[::4]] == ["q0", "q1", "q2", "q3"]
    for rank in (1, 0):
        mine = [row | {"group": row["group"] // 2} for row in rows if row["group"] % 2 == rank]
        own = path.with_name(f"step-000001-rank{rank}.jsonl")
        own.write_text("".join(json.dumps(row) + "\n" for row in mine))
    [shown] = data_of(write_report(run))
    assert [group["id"] for group in shown["groups"]] == ["q0", "q1", "q2", "q3"]
    assert [len(group["games"]) for group in shown["groups"]] == [4] * 4


def test_trajectory_files_are_sorted_by_the_number_of_the_rank(tmp_path):
    """Sorted by name, rank10 would come before rank2."""
    run = write_run(tmp_path / "run", [[group_of(question())]])
    [path] = (run / "trajectories").iterdir()
    rows = rows_of(run)
    for rank in range(11):
        named = [row | {"question": row["question"] | {"id": f"q{rank}"}} for row in rows]
        own = path.with_name(f"step-000001-rank{rank}.jsonl")
        own.write_text("".join(json.dumps(row) + "\n" for row in named))
    [shown] = data_of(write_report(run))
    assert [group["id"] for group in shown["groups"]] == [f"q{rank}" for rank in range(11)]


def test_games_of_steps_that_were_rolled_back_are_not_shown(run, tmp_path):
    """After a rollback, or a kill before the metric line, there are trajectory files without metrics."""
    copy = shutil.copytree(run, tmp_path / "run")
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    [shown] = data_of(write_report(copy))
    assert shown["metrics"]["step"] == [0, 1] and {group["step"] for group in shown["groups"]} == {1}


def test_a_game_shows_what_its_calls_have_cost(tmp_path):
    games = group_of(question())
    games[1].spent = Spending(calls=1, tokens_in=30, tokens_out=4, usd=2e-5)
    [shown] = data_of(write_report(write_run(tmp_path / "run", [[games]])))
    assert [game["usd"] for game in shown["groups"][0]["games"]] == [0, 2e-5, 0, 0]


def test_a_wrong_answer_is_marked_wrong_by_the_rules_of_its_kind():
    """A wrong answer had the same green dot as a right one."""
    cases = [("qa", "the Anna.", True), ("qa", "Bob", False), ("qa", None, False), ("math", "50 %", True)]
    cases += [("qa", "50 %", False), ("text", "Anna", None)]
    for kind, answer, right in cases:
        gold = "0.5" if answer == "50 %" else "Anna"
        assert is_right(answer, {"kind": kind, "answers": [gold]}) is right, (kind, answer)


def test_validation_and_test_games_are_shown_beside_the_training_games(tmp_path):
    run = write_run(tmp_path / "run", [[group_of(question())]])
    log = Log(run, quiet=False)
    for name, answer in (
        ("validation-000001", "Anna"),
        ("validation-000002", "later, and rolled back"),
        ("test-untrained", "Bob"),
        ("test-trained", "Anna"),
    ):
        game = play_game(question(), [think("so", answer=answer)], [])
        scored = ScoredGame(game, score(game, rule=RULES["release"]), None)
        log.trajectories(f"{name}-rank0", [[scored]])
    [shown] = data_of(write_report(run))
    training, validation, test = shown["groups"]
    assert [group["kind"] for group in shown["groups"]] == ["training", "validation", "test"]
    assert len(training["games"]) == 4 and validation["step"] == 1
    [game] = validation["games"]
    assert game["right"] and game["reward"]["total"] < 0 and game["advantage"] is None
    players = [(game["player"], game["right"]) for game in test["games"]]
    assert players == [("untrained agent", False), ("trained agent", True)]


def test_the_tables_of_the_test_are_shown(tmp_path):
    run = write_run(tmp_path / "run", [[group_of(question())]])
    [shown] = data_of(write_report(run))
    assert shown["tables"] == []
    first = markdown_table(["method", "EM"], [["**trained agent**", "0.9"], ["<b>", ""]])
    (run / "test.md").write_text(f"{first}\n\n{markdown_table(['kind', 'pass@5'], [['all', '0.500']])}\n")
    [shown] = data_of(write_report(run))
    expected = [["method", "EM"], ["trained agent", "0.9"], ["<b>", ""]]
    assert shown["tables"] == [expected, [["kind", "pass@5"], ["all", "0.500"]]]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no metrics"):
        write_report(tmp_path)


BINARY = bytes(range(256)) * 9
LINE = b'{"step": 1, "reward/mean": 1.0}\n'
GAMES = "trajectories/step-000001-rank0.jsonl"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("metrics.jsonl", BINARY, "metrics.jsonl holds no line of metrics"),
        ("config.yaml", BINARY, "config.yaml is not a file of settings"),
        ("config.yaml", b"- 1\n", "config.yaml is not a file of settings"),
        ("config.yaml", b"a: [\n", "config.yaml is not a file of settings"),
        ("config.yaml", b"a: !!int x\n", "config.yaml is not a file of settings"),
        (GAMES, b'{"question": 7}\n', "step 1: a line is not a game"),
        (GAMES, b'{"question": {"id": []}, "turns": [7]}\n', "step 1: a line is not a game"),
    ],
)
def test_a_file_that_is_not_of_a_run_is_refused_by_its_name(tmp_path, name, content, sentence):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "metrics.jsonl").write_bytes(LINE)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_damaged_lines_are_skipped(run, tmp_path):
    """Not UTF-8, not an object, nested too deeply, or a number that JSON does not have."""
    copy = shutil.copytree(run, tmp_path / "run")
    damage = BINARY + b'\n[1]\n7\n"step"\n' + b"[" * 100_000 + b"\n"
    lines = b'{"step": 2, "kl": 1e999, "val/n": "ten", "val/em": []}\n'
    for path in [copy / "metrics.jsonl", *(copy / "trajectories").iterdir()]:
        path.write_bytes(damage + path.read_bytes() + damage + lines * (path.name == "metrics.jsonl"))
    [whole], [damaged] = data_of(write_report(run)), data_of(write_report(copy))
    assert damaged["groups"] == whole["groups"]
    for name, values in whole["metrics"].items():
        assert damaged["metrics"][name] == [*values, 2 if name == "step" else None]


def test_an_empty_file_of_settings_is_a_run_without_settings(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(LINE)
    (tmp_path / "config.yaml").write_bytes(b"")
    [shown] = data_of(write_report(tmp_path))
    assert shown["settings"] == {} and shown["metrics"]["step"] == [1]


def test_a_number_of_games_below_1_is_refused(run):
    with pytest.raises(UsageError, match="--games must be above 0, not -3"):
        main([str(run), "--games", "-3"])


def test_a_symbolic_link_in_place_of_the_temporary_file_is_not_followed(run, tmp_path):
    """Its target was overwritten with the page."""
    target, out = tmp_path / "target", tmp_path / "report.html"
    target.write_text("precious")
    (tmp_path / ".report.html.partial").symlink_to(target)
    write_report(run, out=out)
    assert target.read_text() == "precious" and not out.is_symlink() and data_of(out)
