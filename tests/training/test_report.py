"""The report shows games and curves of the run's files; hostile texts stay text; the page loads nothing."""

import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.programs.tables import markdown_table
from prompt_r1.reward import RULES
from prompt_r1.training.charts import HEIGHT, WIDTH, axis_end, charts_of
from prompt_r1.training.log import read_metrics
from prompt_r1.training.report import is_right, read_groups, write_report
from prompt_r1.types import Question
from tests.support.played import HOSTILE, group_of, write_run


class Page(HTMLParser):
    """The elements of a page, and the text inside of each class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.elements if name in (attrs.get("class") or "").split()]


def question(number: int = 0) -> Question:
    return Question(f"q{number}", "maths", f"Who is number {number}?", ("Anna",))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Five steps of two questions with four games each."""
    groups = [group_of(question(number)) for number in range(10)]
    steps = [groups[place : place + 2] for place in range(0, 10, 2)]
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps)


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text("utf-8"))


def test_the_first_the_middle_the_last_and_the_best_step_are_shown(run):
    groups = read_groups(run, best=2)
    assert [group.source for group in groups] == [f"training step {n}" for n in (1, 2, 3, 5) for _ in "ab"]
    page = page_of(run)  # the only validation was at step 0
    assert [shown["data-kind"] for shown in page.of_class("group")] == [
        f"training step {step}" for step in (1, 1, 3, 3, 5, 5)
    ]


def test_the_page_has_every_turn_reply_and_reward_of_the_games_that_it_shows(run):
    page = page_of(run)
    for step in (1, 3, 5):
        file = run / f"trajectories/step-{step:06d}-rank0.jsonl"
        for row in map(json.loads, file.read_text("utf-8").splitlines()):
            assert row["question"]["text"] in page.text
            for turn in row["turns"]:
                assert turn["text"] in page.text and (turn["reply"] or "") in page.text
            if row["reward"]:
                assert f"reward {row['reward']['total']:.2f} = −" in page.text


@pytest.mark.parametrize("of_rank_1", [1, 0])
def test_the_groups_of_two_ranks_stay_apart(tmp_path, of_rank_1):
    """A bug: with few questions, both ranks drew the same one, and their groups were shown as one."""
    run = write_run(tmp_path / "run", [[group_of(question(0))], [group_of(question(of_rank_1))]])
    games = run / "trajectories"
    (games / "step-000002-rank0.jsonl").rename(games / "step-000001-rank1.jsonl")
    assert [len(group.games) for group in read_groups(run, best=1)] == [4, 4]


def test_the_page_opens_on_a_training_group_of_right_and_wrong_games(tmp_path):
    """It opened on a game without colour, beside a legend of colours."""
    all_right, mixed = group_of(question(0))[:3:2], group_of(question(1))
    page = page_of(write_run(tmp_path / "run", [[all_right, mixed]]))
    first, second = page.of_class("group")
    assert "open" in first and first["data-right"] == "mixed"
    assert "open" not in second and second["data-right"] == "all"
    articles = [attrs["class"] for tag, attrs in page.elements if tag == "article"][:4]
    assert "better" in articles and "worse" in articles


def test_a_group_without_a_right_game_has_no_tick(tmp_path):
    """ "✓ 0/5" had a tick where none is right."""
    wrong = [group_of(question())[1]] * 2
    page = page_of(write_run(tmp_path / "run", [[wrong]]))
    assert "0 of 2 right" in page.text and "✓" not in page.text
    assert page.of_class("group")[0]["data-right"] == "none"


def test_games_of_long_texts_are_not_counted_as_wrong(tmp_path):
    """A bug: each question of a summary had "0 of 4 right", though no answer to it is right or wrong."""
    text = replace(question(), kind="text")
    page = page_of(write_run(tmp_path / "run", [[group_of(text), group_of(question(1))]]))
    assert page.text.count("of 4 right") == 1


def test_calls_failures_and_retries_are_counted(run, tmp_path):
    """A bug: the calls of a validation counted as sent, but not as failed."""
    copy = shutil.copytree(run, tmp_path / "run")
    with (copy / "metrics.jsonl").open("a") as file:
        for line in (
            {
                "step": 4,
                "env/errors": 2.0,
                "val/errors": 4,
                "env/failed_requests": 3.0,
                "games": 8.0,
                "games/s": 90.0,
            },
            {"step": 5, "env/errors": 1.0, "env/outcomes/length": 2.0, "env/outcomes/content_filter": 1.0},
        ):
            file.write(json.dumps(line) + "\n")
    text = page_of(copy).text
    assert "5 steps · 8 games trained" in text and "7 calls failed" in text and "3 requests retried" in text
    assert "3 replies filtered, cut or empty" in text


def test_hostile_texts_are_shown_and_never_markup(tmp_path):
    groups = [
        group_of(Question(f"q{n}", text, text, ("Anna", text)), reply=text) for n, text in enumerate(HOSTILE)
    ]
    plain = [group_of(question(n)) for n in range(len(HOSTILE))]
    hostile = write_report(write_run(tmp_path / "hostile", [groups])).read_text("utf-8")
    harmless = write_report(write_run(tmp_path / "plain", [plain])).read_text("utf-8")
    tags = [[tag for tag, _ in Page(html).elements if tag != "i"] for html in (hostile, harmless)]
    assert tags[0] == tags[1] and hostile.count("<script") == 1
    assert not re.search("[\0\x07\u202e\u2066\u2028\ud800-\udfff]", hostile)
    for text in ("</script><script>document.title='owned'</script>", "{{constructor}} ${alert(1)}"):
        assert Page(hostile).text.count(text) > 4


def test_the_page_loads_nothing_and_runs_only_its_own_script(run):
    html = write_report(run).read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|innerHTML|\beval\(|document\.write", html)
    assert "style=" not in html and not re.search(r"\son\w+=", html)
    assert "Content-Security-Policy\" content=\"default-src 'none'; " in html


def test_of_many_questions_those_with_right_and_wrong_games_are_shown(tmp_path):
    """A page of all games of the mini run had 13.8 MB."""
    even, mixed = group_of(question(0))[:3:2], group_of(question(1))
    page = page_of(write_run(tmp_path / "run", [[even] * 20 + [mixed] * 5]))
    assert [shown["data-right"] for shown in page.of_class("group")] == ["mixed"] * 5 + ["all"] * 7


def test_a_wrong_answer_is_marked_wrong_by_the_rules_of_its_kind():
    """A wrong answer had the same green dot as a right one."""
    cases = [("qa", "the Anna.", True), ("qa", "Bob", False), ("qa", None, False), ("text", "Anna", None)]
    for kind, answer, right in cases:
        row = {"answer": answer, "question": {"kind": kind, "answers": ["Anna"]}}
        assert is_right(row) is right, (kind, answer)


def test_the_tables_of_the_test_are_shown(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    table = markdown_table(["method", "EM"], [["**a|b**", "0.9"]])
    (copy / "test.md").write_text(f"{table}\n\nEM of a free text is 0.\n")
    page = write_report(copy).read_text("utf-8")
    assert re.findall("<td>(.*?)</td>", page) == ["method", "EM", "a|b", "0.9"]
    # A bug: the note below the table was a row of it, without its first and last letter.
    assert '<p class="muted">EM of a free text is 0.</p>' in page


def test_a_curve_has_the_points_of_its_metric_between_the_ends_of_the_axis(run):
    [turns] = [chart for chart in charts_of(read_metrics(run)) if chart.plan.title == "Turns"]
    assert turns.curves == {"2": [(WIDTH * step / 5, 0.0) for step in (1, 2, 3, 4, 5)]}
    assert turns.last_step == "5" and turns.ticks == ["2", "1", "0"]


def test_a_curve_has_no_point_where_its_metric_is_not_finite():
    values = {0: 0.0, 1: math.nan, 2: 0.5}
    [chart] = charts_of([{"step": step, "val/em": em} for step, em in values.items()])
    assert chart.curves == {"0.5": [(0.0, HEIGHT), (WIDTH, HEIGHT / 2)]}


def test_the_axis_of_values_below_0_begins_below_0():
    [chart] = charts_of([{"step": step, "reward/mean": 2.0 * step - 1} for step in (0, 1)])
    assert chart.curves == {"1": [(0.0, HEIGHT), (WIDTH, 0.0)]} and chart.ticks == ["1", "0", "-1"]


def test_without_metrics_there_are_no_charts():
    assert charts_of([]) == []


@pytest.mark.parametrize(
    ("value", "end"),
    [
        (0.0802, 0.1),
        (0.1, 0.1),
        (0.11, 0.2),
        (0.5, 0.6),
        (3.0, 4.0),
        (1234.0, 2000.0),
        (0.0, 0.0),
        (-1.0, 0.0),
    ],
)
def test_an_axis_ends_at_a_number_of_one_digit(value, end):
    """The ticks were the values themselves: 0.0802 at the top, and 0.0401 in the middle."""
    assert axis_end(value) == end


def test_validations_have_markers(run, tmp_path):
    """Few steps validate: between two validations the line said nothing of where they are."""
    copy = shutil.copytree(run, tmp_path / "run")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "val/em": 0.9}\n')
    circles = [attrs for tag, attrs in page_of(copy).elements if tag == "circle"]
    assert [circle["cx"] for circle in circles] == ["0.0", f"{WIDTH:.1f}"]


SUM = re.compile(
    r"reward (-?[\d.]+) = −([\d.]+) \+ format ([\d.]+)(?: \+ answer ([\d.]+)|; the gate is shut)"
)


def test_the_terms_of_a_reward_add_up(run):
    """The page said "reward 1.00 = format 1.00, answer 1.00": −ε was missing."""
    sums = SUM.findall(page_of(run).text)
    assert {answer != "" for *_, answer in sums} == {True, False}  # open and shut gates
    for total, epsilon, format_reward, answer in sums:
        assert float(epsilon) == RULES["release"].epsilon
        assert float(total) == pytest.approx(-float(epsilon) + float(format_reward) + float(answer or 0))


def test_a_reward_of_the_users_own_is_not_shown_as_the_sum(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    with (copy / "config.yaml").open("a") as file:
        file.write("reward: my_code:reward\n")
    text = page_of(copy).text
    assert "by --reward; format 1.00, answer 1.00" in text and " = −" not in text


def test_the_page_names_the_agent_and_its_environment(run):
    page = page_of(run)
    assert "run: mini asks mini" in page.text
    assert "Agent mini, environment mini" in page.text


def test_the_best_step_is_that_of_the_exported_agent(run, tmp_path):
    """Of two equal validations, or with a reward of the user's, the report chose another one."""
    copy = shutil.copytree(run, tmp_path / "run")
    with (copy / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "val/em": 0.9}}\n' for step in (2, 4))
    (copy / "agent/training.json").write_text('{"step": 2}')
    page = page_of(copy)
    assert "Validation EM 0.100 → 0.900 at step 2" in page.text
    assert "training step 2" in {shown["data-kind"] for shown in page.of_class("group")}


BINARY = bytes(range(256)) * 9


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "there are no metrics"),
        ({"metrics.jsonl": BINARY}, "there are no metrics"),
        ({"metrics.jsonl": b'{"step": 1}'}, "config.yaml: No such file"),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path, files, sentence):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trajectories/step-000001-rank0.jsonl", '{"group": 0, "question": {"id": []}, "turns": [7]}\n'),
        ("config.yaml", "agent: mini\n"),
        ("metrics.jsonl", '{"step": 1, "games": NaN}\n'),
    ],
)
def test_damaged_files_are_named_in_a_sentence(run, tmp_path, name, content):
    """A bug: a flipped bit in the games of a run ended its report with a traceback."""
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / name).write_text(content)
    with pytest.raises(UsageError, match=r"run: its settings, metrics or games are damaged"):
        write_report(copy)


def test_damaged_lines_are_skipped(run, tmp_path):
    """Not UTF-8, not an object, or nested too deeply."""
    copy = shutil.copytree(run, tmp_path / "run")
    damage = BINARY + b'\n[1]\n7\n"step"\n' + b"[" * 100_000 + b"\n"
    whole = page_of(copy).text
    for path in [copy / "metrics.jsonl", *(copy / "trajectories").iterdir()]:
        path.write_bytes(damage + path.read_bytes() + damage)
    assert page_of(copy).text == whole
