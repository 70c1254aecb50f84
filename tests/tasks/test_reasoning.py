"""Tasks of reasoning-gym: disjoint splits, their verifier as reward, and what happens when it raises."""

import sys

import pytest

from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.train_settings import train_config
from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.data.sampler import digest_of
from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.reward import score, score_games
from prompt_r1.tasks import packages, reasoning
from prompt_r1.tasks.reasoning import Verifier
from prompt_r1.types import Question
from tests.support.played import play_game
from tests.support.tiny import think

NAME = "reasoning_gym:chain_sum"
ARGS = '{"size": 50, "min_terms": 2, "max_terms": 2, "max_digits": 1}'


def test_a_missing_package_is_one_sentence_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning._dataset.cache_clear()
    with pytest.raises(UsageError, match=r"cannot be imported .*pip install reasoning-gym"):
        find_questions([NAME], "train", 12345)


def test_a_task_brings_its_own_validation_and_test_questions():
    config, name = train_config(["--data", NAME, "--data-args", ARGS])
    assert (config.val_data, config.test_data) == ((NAME,), (NAME,)) and config.has_verifier
    assert name == "mini-reasoning_gym-chain_sum"
    with pytest.raises(UsageError, match="--data-args has the sizes of"):
        train_config(["--data-args", ARGS])


@pytest.fixture
def package():
    return pytest.importorskip("reasoning_gym")


def test_splits_share_no_seed_and_training_sees_no_text_of_the_others(package):
    splits = [find_questions([NAME], split, 3, ARGS) for split in packages.SPLITS]
    first = find_questions([NAME], "train", 4, ARGS)
    seeds = [
        {int(seed) + int(index) for _, seed, index in (one.id.split("/") for one in split)}
        for split in (*splits, first)
    ]
    assert sum(map(len, seeds)) == len(set().union(*seeds))
    training, *others = ({question.text for question in split} for split in splits)
    assert 0 < len(training) < 50 and training.isdisjoint(set().union(*others))
    assert splits[0][0].id.startswith("chain_sum/9000000/")
    assert training_and_validation([NAME], [NAME], seed=3, limit=9, args=ARGS)[0] == splits[0]
    assert digest_of(splits[0]) == digest_of(find_questions([NAME], "train", 3, ARGS))


def test_the_reward_of_an_answer_is_their_score_and_f1_for_other_questions(package):
    [question, *_] = find_questions(["reasoning_gym:leg_counting"], "test", 0)
    rule = AgentConfig(data=("reasoning_gym:leg_counting",), rule="release").reward_rule
    [gold] = question.answers
    dataset = package.create_dataset("leg_counting", size=1, seed=0)
    for answer in (gold, f"{gold} legs", "no idea"):
        turns = [think("a", prompt="Who?"), think("b", answer=answer)]
        reward = score(play_game(question, turns, ["Anna."]), rule=rule)
        assert reward.answer == dataset.score_answer(answer=answer, entry=question.extra["entry"])
    assert rule.metric("Anna", Question("q", "d", "Who?", ("Anna",))) == 1


@pytest.mark.parametrize(
    ("task", "args", "sentence"),
    [
        ("chain_sums", "", "no task 'chain_sums' here; the nearest are chain_sum"),
        ("chain_sum", '{"foo": 1}', "--data-args for reasoning_gym:chain_sum: .*'foo'"),
        ("chain_sum", '{"min_terms": 5, "max_terms": 3}', "max_terms must be >= min_terms"),
        ("chain_sum", '{"size": 0}', "size must be 1 to 1,000,000"),
        ("chain_sum", "[1]", "--data-args takes a JSON object"),
        ("boxnet", "", "has questions without a gold answer"),
    ],
)
def test_unknown_tasks_and_wrong_sizes_are_one_sentence(package, task, args, sentence):
    with pytest.raises(UsageError, match=sentence):
        find_questions([f"reasoning_gym:{task}"], "validation", 0, args)


class Broken:
    """A dataset whose verifier raises at some of its calls."""

    def __init__(self, *raises: bool) -> None:
        self.raises = list(raises)

    def score_answer(self, answer: str, entry: object) -> float:
        if self.raises.pop(0):
            raise ZeroDivisionError("no")
        return 0.5


def broken_game(monkeypatch, *raises: bool):
    dataset = Broken(*raises)
    monkeypatch.setattr(reasoning, "_dataset", lambda *arguments: dataset)
    extra = {"package": "reasoning_gym", "task": "t", "args": {}, "entry": {}}
    turns = [think("a", prompt="Who?"), think("b", answer="Anna")]
    return play_game(Question("t/0/1", "t", "Who?", ("Anna",), extra=extra), turns, ["Anna."])


def test_a_verifier_that_raises_once_is_asked_again_and_one_that_raises_twice_breaks_its_game(monkeypatch):
    rule = AgentConfig(data=(NAME,), rule="release").reward_rule
    [reward] = score_games([broken_game(monkeypatch, True, False)], rule=rule)
    assert reward is not None and reward.answer == 0.5
    game = broken_game(monkeypatch, True, True)
    assert score_games([game], rule=rule) == [None]
    assert game.stop == "env_error"
    assert game.error == "the verifier of t/0/1 raised ZeroDivisionError: no"


def test_more_than_five_percent_of_broken_verifications_stop_the_run(monkeypatch):
    verify = Verifier()
    question = broken_game(monkeypatch, *[True] * 20, *[False] * 300, *[True] * 22).question
    for _ in range(10):  # 5 % of the last 200
        with pytest.raises(EnvError):
            verify("a", question)
    assert [verify("a", question) for _ in range(300)] == [0.5] * 300
    for _ in range(10):
        with pytest.raises(EnvError):
            verify("a", question)
    with pytest.raises(Resumable, match="11 of the last 200 answers could not be scored: the verifier"):
        verify("a", question)
