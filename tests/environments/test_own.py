"""An environment of the user's that answers many dialogues at once."""

import asyncio

import pytest

from prompt_r1.environments.sources import FreeSource
from prompt_r1.errors import EnvError, UsageError
from tests.support.counting import HELLO


class Batches:
    """Says which game it answers, and remembers the size of each batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def ask_many(self, dialogues, sessions, samples, seed):
        self.sizes.append(len(dialogues))
        return [f"{session}/{sample} of {seed}" for session, sample in zip(sessions, samples, strict=True)]


def ask_five(own: object) -> list[object]:
    """The replies, or errors, of five games that call at the same time."""
    source = FreeSource(own, seed=3)

    async def games() -> list[object]:
        calls = (source.call(HELLO, session="q", sample=sample) for sample in range(5))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        return [getattr(one, "text", one) for one in outcomes]

    return asyncio.run(games())


def test_games_that_call_at_the_same_time_are_answered_by_one_call_of_ask_many():
    own = Batches()
    assert FreeSource(own, seed=0).by_session
    assert ask_five(own) == [f"q/{sample} of 3" for sample in range(5)] and own.sizes == [5]


def test_calls_that_come_during_a_batch_are_in_the_next_one_and_cancelled_ones_in_none():
    started, go_on, sizes = asyncio.Event(), asyncio.Event(), []

    class Slow:
        async def ask_many(self, dialogues):
            sizes.append(len(dialogues))
            started.set()
            await go_on.wait()
            return ["yes"] * len(dialogues)

    async def play() -> list[str]:
        source = FreeSource(Slow(), seed=0)
        first = asyncio.create_task(source.call(HELLO))
        await started.wait()
        later = [asyncio.create_task(source.call(HELLO)) for _ in range(3)]
        await asyncio.sleep(0)
        later.pop().cancel()
        go_on.set()
        return [outcome.text for outcome in await asyncio.gather(first, *later)]

    assert asyncio.run(play()) == ["yes"] * 3 and sizes == [1, 2]


def test_an_environment_error_in_a_batch_fails_its_own_call_only():
    class Partly:
        def ask_many(self, dialogues, samples):
            return [EnvError("down") if sample == 2 else "yes" for sample in samples]

    replies = ask_five(Partly())
    assert isinstance(replies.pop(2), EnvError) and replies == ["yes"] * 4


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ("yes", "ask_many must return a list of 5 replies"),
        (["yes"], "ask_many must return a list of 5 replies"),
        ([1] * 5, "returned int, not a string"),
    ],
)
def test_a_wrong_reply_to_a_batch_is_one_sentence(reply, sentence):
    class Wrong:
        def ask_many(self, dialogues):
            return reply

    assert all(isinstance(one, UsageError) and sentence in str(one) for one in ask_five(Wrong()))


def test_an_error_in_ask_many_names_the_environment_and_the_line():
    class Broken:
        def ask_many(self, dialogues):
            return 1 / 0

    assert all("Broken raised ZeroDivisionError" in str(one) for one in ask_five(Broken()))


def test_what_a_plain_function_returns_is_awaited_if_it_can_be():
    """An async function behind a decorator or a lambda was refused: "returned coroutine, not a string"."""

    async def answer(text):
        await asyncio.sleep(0)
        return text

    class One:
        def ask(self, messages):
            return answer("yes")

    class Many:
        def ask_many(self, dialogues):
            return answer(["yes"] * len(dialogues))

    assert ask_five(One()) == ask_five(Many()) == ["yes"] * 5
