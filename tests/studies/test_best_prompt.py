"""The study that tries all combinations of advice."""

import asyncio
from statistics import fmean

from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import FILE, read_predictions
from prompt_r1.evaluation.searches import task_score
from prompt_r1.f1 import exact_match
from prompt_r1.miniworld.questions import mini_questions
from studies import best_prompt
from studies.advice import ADVICE, AdvisedEnvironment
from studies.best_prompt import all_prompts, answer


def test_each_combination_of_advice_has_one_prompt():
    prompts = all_prompts()
    assert len(set(prompts)) == len(prompts) == 2 ** len(ADVICE)
    assert prompts[0] == "" and set(prompts[1:10]) == {f"{phrase.capitalize()}." for phrase in ADVICE}


def test_the_best_prompt_has_the_highest_share_of_right_answers(monkeypatch):
    wanted = ["", "Be quick.", "Step by step.", "Step by step. Reply with the name alone.", "Be creative."]
    monkeypatch.setattr(best_prompt, "all_prompts", lambda: wanted)
    environment = AdvisedEnvironment(seed=0)
    questions = mini_questions(0, "train", "bridge")[:100]
    found = asyncio.run(best_prompt.best_prompt(environment, questions))
    shares = {}
    for prompt in wanted:
        environment.instructions = prompt
        replies = [environment.reply(f"{question.text} Answer only.").text for question in questions]
        pairs = zip(replies, questions, strict=True)
        shares[prompt] = fmean(exact_match(reply, question.answers) for reply, question in pairs)
    assert found == "Step by step. Reply with the name alone." == max(shares, key=shares.__getitem__)


def test_its_answers_stand_beside_those_of_the_evaluation_each_under_the_prompt_of_its_kind(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(best_prompt, "all_prompts", lambda: ["", "Give all details."])
    (tmp_path / FILE).touch()
    best_prompt.main([str(tmp_path), "--seed", "1"])
    test = mini_questions(1, "test") + mini_questions(1, "test", "ood")
    answers = {one.question.id: one for one in read_predictions(tmp_path / FILE)}
    assert list(answers) == [question.id for question in test]
    environment = AdvisedEnvironment(seed=1)
    for question in test:
        if question.dataset == "gen":
            expected = asyncio.run(answer(environment, "Give all details.", question))
            assert task_score(answers[question.id]) == task_score(expected)
    assert "best prompt" not in METHODS  # so `studies.seeds` shows it beside the methods
