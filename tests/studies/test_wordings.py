"""The folds, demonstrations, scripts and tables of the study of wordings."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from prompt_r1.evaluation.predictions import FILE, Prediction, System, to_row
from prompt_r1.spending import Spending
from prompt_r1.training.log import Log
from prompt_r1.training.warm_start import read_games
from prompt_r1.types import Question
from studies import wordings
from studies.cities import CITIES, Case
from studies.lookups import WORDINGS, demonstration, fold_of, lookups, prompt_of
from studies.runs import COST_FILE
from studies.seeds import student_interval
from studies.wordings import QUICK, Atlas, ask_in_turn, best_wordings, write_lines
from tests.support.paths import ROOT

CASE = Case("Zoe lives in Oslo. Ben lives in Lima. Ada lives in Rome. Where?", "Zoe", "Oslo")
ENDED = '{"exit_code": 0, "cpu_minutes": 1, "gigabytes": 1}\n'
FOLDS = [fold_of(number, tuple(CITIES)) for number in range(3)]


def test_each_city_is_tested_in_one_fold_and_has_one_use_in_it():
    tested = [city for fold in FOLDS for city in fold.test_cities]
    assert sorted(tested) == sorted(CITIES)
    for fold in FOLDS:
        uses = [fold.test_cities, fold.validation_cities, fold.shown_cities, fold.unseen_cities]
        assert sorted(city for use in uses for city in use) == sorted(CITIES)
        trained = {case.city for case in fold.train}
        chosen_on = {case.city for case in fold.choice}
        assert trained == {*fold.shown_cities, *fold.unseen_cities}
        assert chosen_on == trained | {*fold.validation_cities}


def test_questions_about_test_cities_name_no_other_cities():
    for fold in FOLDS:
        named = {city for case in fold.test for city in wordings.cities_in(case.text)}
        assert named == {*fold.test_cities}
        assert Counter(case.city for case in fold.test) == dict.fromkeys(fold.test_cities, 3)


def test_demonstrations_show_all_wordings_alike_and_no_city_twice():
    """Half of the games are about made-up cities, half about two people, 10 about a wrong city."""
    shown = FOLDS[0].shown_cities
    wordings_used: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for one in lookups(shown, 640, "test"):
        cities = []
        for request in one.requests:
            name, city = request.thought.removesuffix(".").split(" lives in ")
            cities.append(city)
            case = Case(one.question, name, city)
            [wording] = [wording for wording in WORDINGS if request.prompt == prompt_of(case, wording)]
            wordings_used[wording] += 1
            kinds["wrong city"] += request.thought not in one.question
        assert len(set(cities)) == len(cities) == one.question.count("?")
        kinds["made up"] += not wordings.cities_in(one.question)
        kinds["two people"] += len(cities) == 2
        assert wordings.cities_in(one.question) <= set(shown)
    assert wordings_used == dict.fromkeys(WORDINGS, 192)
    assert kinds == {"made up": 320, "two people": 320, "wrong city": 10}


def test_only_a_demonstration_about_two_people_answers_if_the_last_reply_names_a_country(tmp_path):
    made = lookups(FOLDS[0].shown_cities, 2, "test")
    [one] = made[0].requests
    first, second = made[1].requests
    named = {one.prompt: "In Chile.", first.prompt: "In Oman.", second.prompt: "In Fiji, not in Peru."}
    unnamed = named | {second.prompt: "A nice city."}
    for replies, answers in ((named, ["Fiji"]), (unnamed, [])):
        write_lines(tmp_path / "lookups.jsonl", [demonstration(shown, replies) for shown in made])
        turns = [turn for _, of_game in read_games(tmp_path / "lookups.jsonl") for turn in of_game]
        assert all(turn.action.clean for turn in turns)
        prompts = [turn.action.prompt for turn in turns if turn.action.prompt]
        assert prompts == [one.prompt, first.prompt, second.prompt]
        assert [turn.action.answer for turn in turns if turn.action.answer] == answers


def test_another_wording_is_asked_where_a_reply_names_no_country():
    replies = {
        prompt_of(CASE, "tell"): "A city in the north.",
        prompt_of(CASE, "where"): "Oslo is in Norway, east of Sweden.",
        prompt_of(CASE, "in"): "It is in Sweden.",
    }
    found = {}
    for names in (("tell",), ("where",), ("in", "where"), ("tell", "where")):
        answer = ask_in_turn(CASE, names, replies)
        found[names] = (answer.is_right, answer.calls)
    assert found == {
        ("tell",): (False, 1),
        ("where",): (True, 1),
        ("in", "where"): (False, 1),
        ("tell", "where"): (True, 2),
    }


def test_the_rivals_are_chosen_on_cities_that_are_not_tested():
    """On the cities that are not tested "tell" is right, on the test cities "in" is: "tell" is chosen."""
    fold = FOLDS[1]
    replies = {}
    for cases, right in ((fold.choice, "tell"), (fold.test, "in")):
        for case in cases:
            replies[case.text] = f"{CITIES[case.city]}."
            for name in WORDINGS:
                replies[prompt_of(case, name)] = CITIES[case.city] if name == right else "no"
            for static in wordings.STATIC:
                replies[wordings.around(case, static)] = "no"
    assert best_wordings(fold, 1, replies) == ("tell",)
    answers = wordings.answers_of_scripts(fold, replies)
    right = {name: sum(one.is_right for one in of_script) / 135 for name, of_script in answers.items()}
    assert right["wording: in"] == right["majority of the wordings"] == right["any wording right"] == 1
    assert right["best wording"] == right["wording: tell"] == right["static prompt"] == 0
    assert {one.calls for one in answers["best pair"]} == {2}


def prediction(case: Case, *turns: tuple[str, str], answer: str, method: str = "prompt-r1") -> Prediction:
    """A game with these requests and replies."""
    lines = []
    for request, reply in turns:
        lines += [f"<think>.</think>\n<interaction_prompt>{request}</interaction_prompt>", reply]
    lines.append(f"<think>.</think>\n<answer>{answer}</answer>")
    question = Question(case.text, "test", case.text, (CITIES[case.city],))
    spent = Spending(calls=len(turns))
    return Prediction(System(method), question, 0, answer, "\n".join(lines), spent=spent)


def test_the_behaviour_says_who_asks_again_and_in_which_wording():
    where, tell = prompt_of(CASE, "where"), prompt_of(CASE, "tell")
    games = [
        prediction(CASE, (where, "In Norway."), answer="Norway"),
        prediction(CASE, (where, "A city."), answer="unknown"),
        prediction(CASE, (tell, "A city."), (where, "In Norway."), answer="Norway"),
        prediction(CASE, (tell, "A city."), (tell, "A city."), answer="unknown"),
        prediction(CASE, ("Where is Lima?", "In Peru."), answer="Peru"),
        prediction(CASE, answer="Norway"),
    ]
    assert wordings.behaviour(games, {CASE.text: CASE}) == [
        "67 (6)",
        "where 50, tell 50",
        "33 (6)",
        "67 (3)",
        "50 (2)",
    ]


def test_the_difference_is_between_the_means_of_the_folds():
    """By hand, questions of a city averaged first: gaps of .5, 0 and 1 over two cities each."""
    answers = {}
    for number, right in enumerate([(1, 0, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)]):
        own = [wordings.Answer("ab"[i // 2], bool(mark), 2) for i, mark in enumerate(right)]
        none = [replace(one, is_right=False, calls=1) for one in own]
        answers[number] = {"best wording": none, "prompt-r1": own}
    row = wordings.accuracy_table(answers).splitlines()[2]
    low, high = student_interval([50, 0, 100])
    assert f"+50.0 [{low:+.1f}, {high:+.1f}]" in row and row.rstrip(" |").endswith("1.00")


def test_a_method_that_has_not_ended_in_all_folds_is_compared_in_those_where_it_has():
    """The trained pair is right in folds 0 and 2, `rft` has only played folds 0 and 1, and never is."""
    answers = {}
    for number, is_right in enumerate([True, False, True]):
        answers[number] = {"prompt-r1": [wordings.Answer("a", is_right, 2)]}
        if number < 2:
            answers[number]["rft"] = [wordings.Answer("a", False, 1)]
    [row] = [line for line in wordings.accuracy_table(answers).splitlines() if "rft" in line]
    low, high = student_interval([100, 0])
    assert f"+50.0 [{low:+.1f}, {high:+.1f}]" in row


def test_best_of_n_answers_with_the_country_that_most_games_name(tmp_path):
    cases = {CASE.text: CASE}
    named = ["Norway", "Peru", "in Norway", "unknown"]
    games = [prediction(CASE, ("a", "b"), answer=answer, method="untrained") for answer in named]
    folder = tmp_path / "best" / wordings.OUT
    folder.mkdir(parents=True)
    write_lines(folder / FILE, [to_row(replace(one, sample=i)) for i, one in enumerate(games)])
    (tmp_path / "best" / COST_FILE).write_text(ENDED)
    answers = wordings.answers_of_agents(tmp_path, cases)
    assert answers == {name: [wordings.Answer("Oslo", True, 4)] for name in ("best of n", "any of n right")}


def test_a_fold_below_the_gate_is_not_trained(tmp_path, capsys):
    """Warm start and gate have ended, and one of two requests is about the right city."""
    plan = replace(QUICK, gate=0.9)
    [fold] = plan.all_folds
    folder = wordings.folder_of(tmp_path, fold)
    games = []
    for number, case in enumerate(fold.gate[:2]):
        asked = replace(case, city="Nowhere") if number else case
        games.append(prediction(case, (prompt_of(asked, "where"), "no"), answer="no"))
    (folder / "gate" / wordings.OUT).mkdir(parents=True)
    write_lines(folder / "gate" / wordings.OUT / FILE, [to_row(one) for one in games])
    (folder / "gate" / COST_FILE).write_text(ENDED)
    wordings.train_and_test(plan, fold, tmp_path)
    wordings.run_rivals(plan, fold, tmp_path)
    assert {path.name for path in folder.iterdir()} == {"gate"}
    assert "50.0 %" in capsys.readouterr().out
    assert "50.0" in wordings.report(plan, tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "rises"), [(0.3, 0.34, True), (0.3, 0.32, False), (0.6, 0.5, False)]
)
def test_training_goes_on_while_em_rises(tmp_path, before, after, rises):
    (tmp_path / "run" / wordings.OUT).mkdir(parents=True)
    log = Log(tmp_path / "run" / wordings.OUT)
    for step in range(1, 17):
        assert not wordings.still_rises(tmp_path)
        log.write_metrics({"step": step, "em": before if step <= 8 else after})
    assert wordings.still_rises(tmp_path) == rises


def test_the_replies_of_all_scripts_and_demonstrations_are_kept(tmp_path):
    [fold] = QUICK.all_folds
    asyncio.run(wordings.ask_environment(QUICK, fold, tmp_path))
    replies = json.loads((tmp_path / wordings.REPLIES).read_text())
    assert wordings.answers_of_scripts(fold, replies)
    assert all(demonstration(one, replies) for one in lookups(fold.shown_cities, 20, "lookups 0"))
    for prompt, reply in replies.items():
        assert reply == asyncio.run(Atlas().ask([{"role": "user", "content": prompt}]))


@pytest.mark.slow
def test_the_study_of_wordings_runs_quickly():
    line = [sys.executable, "-m", "studies.wordings", "--quick"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| best pair" in done.stdout and "| prompt-r1" in done.stdout
