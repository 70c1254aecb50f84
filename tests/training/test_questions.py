"""The questions of each training step, on each rank."""

from collections import Counter
from dataclasses import replace

import pytest

from prompt_r1.data.files import write_questions
from prompt_r1.data.sampler import questions_of_step
from prompt_r1.errors import QuestionTooLong
from prompt_r1.pair.agent import check_question_lengths
from prompt_r1.protocol import Codec
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.settings.train import PRESETS, TrainConfig
from prompt_r1.training.dry_run import estimate
from prompt_r1.training.run import RunQuestions, repetition_note, with_steps
from prompt_r1.types import Question
from tests.support import tiny
from tests.support.games import ONE_RANK
from tests.support.questions import ids

QUESTIONS = [Question(str(number), "d", "?" * (1 + number % 3), ("a",)) for number in range(7)]


@pytest.mark.parametrize("per_step", [3, 7, 20])
def test_the_epoch_of_a_question_is_how_often_it_was_drawn_before(per_step):
    """A bug: a step counted as the epoch in which it begins, so later occurrences shared sampled replies."""
    questions = RunQuestions(QUESTIONS, (), (), per_step, seed=0)
    before: Counter[str] = Counter()
    for step in range(1, 12):
        for number, question in questions.of_rank(step, ONE_RANK).items():
            assert questions.epoch(step, number) == before[question.id]
            before[question.id] += 1


@pytest.mark.parametrize(("per_step", "epochs", "expected"), [(3, 2, 5), (7, 2, 2), (20, 1, 1), (20, 3, 2)])
def test_epochs_are_the_fewest_steps_that_draw_every_question_so_often(per_step, epochs, expected):
    config = with_steps(TrainConfig(questions=per_step, steps=99, epochs=epochs), len(QUESTIONS))
    assert (config.steps, config.epochs) == (expected, 0)
    drawn = Counter(steps(per_step, config.steps))
    assert min(drawn.values()) >= epochs and len(drawn) == len(QUESTIONS)
    assert sum(Counter(steps(per_step, config.steps - 1)).values()) < epochs * len(QUESTIONS)


def test_the_papers_epoch_is_320_steps():
    config = TrainConfig(epochs=1)
    assert with_steps(config, 8 * 5120).steps == TrainConfig().steps == 320


def test_the_estimate_of_epochs_is_the_estimate_of_their_steps():
    """The mini world has 4,096 training questions, and a step of its preset 16: two epochs are 512 steps."""
    mini = TrainConfig(**PRESETS["mini"])
    assert estimate(replace(mini, epochs=2)) == estimate(replace(mini, steps=512))


def test_a_run_says_how_often_it_repeats_its_questions():
    """A bug: `--config paper` trained 13,653 epochs of a file of three questions without a word."""
    paper = TrainConfig()
    assert repetition_note(paper, 8 * 5120) == ""
    assert "320 steps of 128 draw each of the 3 questions 13,653.3 times" in repetition_note(paper, 3)


def steps(count: int, steps: int, *, seed: int = 0) -> list[str]:
    """The questions of the first steps, one after the other."""
    taken = [questions_of_step(QUESTIONS, step, count=count, seed=seed) for step in range(1, steps + 1)]
    assert all(len(questions) == count for questions in taken)
    return [name for questions in taken for name in ids(questions)]


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_the_questions_of_the_steps_are_shuffled_epochs_one_after_another(count):
    order = steps(count, 42)
    epochs = [order[start : start + 7] for start in range(0, len(order), 7)]
    assert all(Counter(epoch) == Counter(ids(QUESTIONS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs[:3]}) == 3
    assert order == steps(7, 6 * count), "the same order, however many questions a step has"


def test_the_questions_of_a_step_depend_on_the_seed_and_the_step_alone():
    """So a resumed run needs no state: it goes on with the next questions."""
    alone = questions_of_step(QUESTIONS, 5, count=3, seed=1)
    assert ids(alone) == steps(3, 5, seed=1)[12:]
    assert steps(3, 5, seed=1) != steps(3, 5, seed=2)


@pytest.mark.parametrize("part", ["data", "val_data", "test_data"])
def test_a_question_that_is_too_long_is_found_before_the_run_begins(tmp_path, part):
    """Also among those of the test, which is played last."""
    path = tmp_path / "long.jsonl"
    write_questions(path, [Question("long", "own", "why " * 500, ("a",))])
    files = {"data": ("mini:ood",), "val_data": ("mini",), "test_data": ("mini",)} | {part: (str(path),)}
    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    config = TrainConfig(max_tokens=1000, **files)
    with pytest.raises(QuestionTooLong, match=r"question 'long' .* takes"):
        check_question_lengths(RunQuestions.read(config).all, codec, config.game)


def test_every_rank_plays_its_own_questions_of_a_step():
    run = RunQuestions(QUESTIONS, [], [], per_step=5, seed=3)
    whole = run.of_rank(2, ONE_RANK)
    assert whole == dict(enumerate(questions_of_step(QUESTIONS, 2, count=5, seed=3)))
    shares = [run.of_rank(2, replace(ONE_RANK, rank=rank, count=2)) for rank in (0, 1)]
    assert all(shares) and shares[0] | shares[1] == whole and not shares[0].keys() & shares[1].keys()
