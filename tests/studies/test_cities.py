"""The study of cities: its questions, demonstrations and table."""

import asyncio
import json

from prompt_r1.baselines.sft import read_games
from prompt_r1.environments.environment import environment_of
from prompt_r1.evaluation.predictions import FILE, Prediction, System, to_row
from prompt_r1.types import Question
from studies.cities import CITIES, SPLITS, WORDINGS, cases_of, demonstrate, is_right, table


class Atlas:
    """Knows each capital, if it is asked about one."""

    async def ask(self, messages):
        named = [city for city in CITIES if city in messages[-1]["content"]]
        return f"It is in {CITIES[named[0]]}." if len(named) == 1 else "I do not know."


def test_training_validation_and_test_ask_about_different_cities():
    cases = {split: cases_of(split) for split in SPLITS}
    cities = [{case.city for case in of} for of in cases.values()]
    assert sum(map(len, cities)) == len(set.union(*cities)) == len(CITIES) == 134
    for case in cases["test"]:
        assert case.text.count(f"{case.name} lives in {case.city}.") == 1
        assert case.other in case.text and case.other != case.city


def test_an_answer_is_right_if_it_names_the_right_country_and_no_other():
    for text, right in {"He lives in Oman.": 1, "Romania": 0, "Oman or Yemen": 0, "unknown": 0}.items():
        assert is_right(text, "Oman") == right
    assert is_right("Papua New Guinea", "Papua New Guinea") and not is_right("Papua New Guinea", "Guinea")


def test_the_demonstrations_show_every_wording_and_answer_what_the_reply_names(tmp_path):
    cases = cases_of("train")[:80]
    games = asyncio.run(demonstrate(environment_of(Atlas()), cases))
    (tmp_path / "games.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
    shown = set()
    for case, (question, (asking, answering)) in zip(
        cases, read_games(tmp_path / "games.jsonl"), strict=True
    ):
        wording = next(name for name in WORDINGS if asking.action.prompt == case.prompt(name))
        shown.add(wording)
        country = {"as it is": "unknown", "wrong person": CITIES[case.other]}.get(wording, CITIES[case.city])
        assert question.text == case.text and answering.action.answer == country
        assert asking.action.clean and answering.action.clean
    assert shown == set(WORDINGS)


def test_the_table_counts_right_answers_and_requests_about_the_right_city(tmp_path):
    rows, cases = [], cases_of("test")[:10]
    for number, case in enumerate(cases):
        question = Question(case.text, "test", case.text, (CITIES[case.city],))
        prompt = case.prompt("in" if number < 6 else "wrong person" if number < 8 else "as it is")
        raw = f"<think>.</think>\n<interaction_prompt>{prompt}</interaction_prompt>"
        answer = CITIES[case.city] if number < 5 else "unknown"
        rows.append(to_row(Prediction(question, answer, raw, system=System("prompt-r1"))))
    (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    cells = [cell.strip() for cell in table([tmp_path]).splitlines()[-1].split("|")]
    assert cells[1] == "prompt-r1" and cells[2].startswith("50.0 [") and cells[3] == "50.0"
    assert cells[5] == "80%; of these 75%: in 100%"
