"""Games of TextArena: replies are a function of messages and session, and nothing else."""

import asyncio
import random
import re
import sys

import pytest

import prompt_r1
from prompt_r1.data.questions import find_questions
from prompt_r1.environments.environment import Game
from prompt_r1.environments.sources import OwnSource
from prompt_r1.errors import UsageError
from prompt_r1.tasks import packages
from prompt_r1.tasks.text_arena import OVER, TextArenaEnvironment
from tests.support.counting import environment

NAME = "textarena:GuessTheNumber-v0"


def test_a_missing_package_is_one_sentence_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UsageError, match=r"cannot be imported .*pip install textarena"):
        TextArenaEnvironment("")


@pytest.fixture(autouse=True)
def package(request):
    if "missing" not in request.node.name:
        pytest.importorskip("textarena")


def ask(session: str, *moves: str, args: str = "") -> str:
    messages = [message for move in moves for message in turn(move)][:-1]
    return asyncio.run(TextArenaEnvironment(args).ask(messages, session))


def turn(move: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": move}, {"role": "assistant", "content": "…"}]


def test_the_game_replies_to_moves_and_the_answer_is_its_secret():
    for question in find_questions([NAME], "validation", 0)[:20]:
        low, high = 1, 20
        for _ in range(5):  # the oracle: binary search
            guess = (low + high) // 2
            reply = ask(question.id, f"[{guess}]")
            if "Congratulations" in reply:
                low = high = guess
                break
            low, high = (guess + 1, high) if "higher" in reply else (low, guess - 1)
            assert reply == f"The target number is {'higher' if low > guess else 'lower'}."
        assert question.answers == (str(low),) and low == high


def test_a_reply_depends_on_messages_and_session_only():
    [first, second] = find_questions(["textarena:Mastermind-v0"], "train", 0, '{"size": 2}')
    moves = [f"[{move}]" for move in ("1 2 3 4", "4 3 2 1")]
    random.seed(1)
    before, reply = random.getstate(), ask(first.id, *moves)
    assert random.getstate() == before  # their games seed the global generator
    random.seed(2)
    assert ask(first.id, *moves) == reply and "black peg" in reply
    other = ask(second.id, f"[{second.answers[0]}]")
    assert other != ask(first.id, f"[{second.answers[0]}]") and "cracked the code" in other
    assert ask(second.id, f"[{second.answers[0]}]", "[1 2 3 4]") == OVER


def test_an_invalid_move_is_the_games_own_matter():
    [question] = find_questions([NAME], "train", 0, '{"size": 1}')
    assert "You attempted an invalid move" in ask(question.id, "Is it 10?")
    assert "Invalid Move" in ask(question.id, "Is it 10?", "Is it 11?")


def test_sizes_change_questions_and_environment_alike():
    args = '{"size": 30, "max_number": 3}'
    questions = find_questions([NAME], "train", 0, args)
    assert {question.answers for question in questions} == {("1",), ("2",), ("3",)}
    assert "between 1 and 3" in questions[0].text
    assert all("Congratulations" in ask(one.id, f"[{one.answers[0]}]", args=args) for one in questions)


def test_splits_share_no_seed():
    ids = [one.id for split in packages.SPLITS for one in find_questions([NAME], split, 0, '{"size": 9}')]
    assert len(set(ids)) == len(ids) and ids[0] == "GuessTheNumber-v0/0/0"


def test_calls_are_recorded_by_question_and_a_resumed_run_replays_them(tmp_path):
    questions = find_questions([NAME], "train", 0, '{"size": 8}')

    def replies(mode: str) -> list[str]:
        async def play() -> list[str]:
            asked = environment(OwnSource(TextArenaEnvironment(""), seed=0), folder=tmp_path, mode=mode)
            return [await asked.ask(turn("[10]")[:1], Game(one.id)) for one in questions]

        return asyncio.run(play())

    first = replies("reuse")
    assert len(set(first)) > 1 and replies("replay") == first


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("textarena:GuessNumber-v0", "", "no task 'GuessNumber-v0' here; the nearest are GuessTheNumber-v0"),
        (NAME, '{"foo": 1}', "--data-args for textarena:GuessTheNumber-v0: .*'foo'"),
    ],
)
def test_unknown_games_and_wrong_sizes_are_one_sentence(name, args, sentence):
    with pytest.raises(UsageError, match=sentence):
        find_questions([name], "train", 0, args)


def test_other_questions_are_refused():
    with pytest.raises(UsageError, match="plays the questions of --data textarena:GAME only"):
        ask("q1", "[10]")


def test_a_run_that_stops_and_resumes_ends_like_an_uninterrupted_one(asking_agent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def trained(out: str, steps: int) -> dict[str, object]:
        folder = prompt_r1.train(
            "mini",
            agent=asking_agent,
            env="textarena",
            data=[NAME],
            test_data=["none"],
            val_limit=3,
            steps=steps,
            questions=2,
            group_size=3,
            mini_batch=6,
            max_new=64,
            max_tokens=2000,
            device="cpu",
            out=out,
        )
        games = sorted((folder / "trajectories").glob("step-*.jsonl"))
        weights = (folder / "agent/model.safetensors").read_bytes()
        return {"weights": weights} | {
            file.name: re.sub(r'"latency":[^,}]+', "", file.read_text()) for file in games
        }

    whole = trained("whole", 3)
    trained("parts", 1)
    assert trained("parts", 3) == whole and len(whole) == 4
