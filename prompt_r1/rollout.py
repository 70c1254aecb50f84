"""One game as a coroutine, groups of games side by side, and recorded games as trajectories.

While one game waits for the environment, the other games continue to decode. If a call fails, its game ends
as "env_error", and gets neither a reward nor an advantage (`grpo.group_advantages`). So the agent never sees
the text of an error.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import Protocol, TypeVar

from prompt_r1.errors import EnvError, UsageError
from prompt_r1.protocol import Codec, parse, shown_reply
from prompt_r1.types import (
    Action,
    Ask,
    Completion,
    GameSettings,
    Generate,
    Message,
    Question,
    Stop,
    Trajectory,
    Turn,
)

Result = TypeVar("Result")


async def play(
    question: Question, generate: Generate, ask: Ask, codec: Codec, settings: GameSettings, *, seed: str
) -> Trajectory:
    """Play one game (paper, eqs 1-11).

    In each turn the agent thinks, and then asks the environment or answers. The environment sees only the
    prompts and replies of this game, so it knows the question only as far as the agent repeats it. A prompt
    of the last turn is not sent, because the agent could not read the reply.
    """
    trajectory = Trajectory(question)
    history: list[Message] = []
    context = codec.opening(question.text)
    for number in range(1, settings.max_turns + 1):
        if len(trajectory.tokens) + len(context) >= settings.max_tokens:
            trajectory.stop = "max_tokens"  # There is no room for a turn, so the last reply is not appended.
            break
        trajectory.add_context(context)
        max_new = min(settings.max_new, settings.max_tokens - len(trajectory.tokens))
        completion = await generate(trajectory.tokens, max_new=max_new, seed=f"{seed}/{number}")
        trajectory.add_sampled(completion)
        text = codec.turn_text(completion.tokens)
        action = parse(text)
        trajectory.stop = stop_of(action, completion, is_last=number == settings.max_turns)
        if trajectory.stop is not None:
            trajectory.turns.append(Turn(text, action, reply=None))
            break
        assert action.prompt, "a turn without a prompt ends the game"
        history.append({"role": "user", "content": action.prompt})
        start = time.perf_counter()
        reply = None
        try:
            reply = await ask(history)
        except EnvError as error:
            trajectory.stop = "env_error"
            trajectory.error = str(error)
        trajectory.turns.append(Turn(text, action, reply, latency=time.perf_counter() - start))
        if reply is None:
            break
        shown = shown_reply(reply)
        history.append({"role": "assistant", "content": shown})
        context = codec.reply(shown, after=trajectory.tokens[-1], max_tokens=settings.max_reply_tokens)
    return trajectory


def stop_of(action: Action, completion: Completion, *, is_last: bool) -> Stop | None:
    """Why the game ends with this turn of the agent; None if the environment is asked next."""
    if action.answer is not None:
        return "answered"
    if not action.prompt:
        return "malformed" if completion.finished else "max_tokens"
    return "max_turns" if is_last else None


def trajectory_of(
    question: Question, turns: list[Turn], codec: Codec, *, max_reply_tokens: int = 0
) -> Trajectory:
    """Encode a game as the trajectory that `play` would have recorded.

    The text of a turn is what the agent itself writes. If the chat template opens every turn with a <think>
    (`codec.opened`), the texts must not begin with it, because the opening and the replies already end with
    it. The turns that `play` records begin with it (`Codec.turn_text`), so the caller removes it from them.

    Each turn ends with the end token. `max_reply_tokens`: as in GameSettings. Raises UsageError for a turn
    that contains an end token, because the agent's turn would end there.
    """
    trajectory = Trajectory(question)
    context = codec.opening(question.text)
    for turn in turns:
        trajectory.add_context(context)
        written = codec.encoder.trusted(turn.text)
        for token in written:
            if token in codec.stop_ids:
                end = codec.tokenizer.convert_ids_to_tokens(token)
                raise UsageError(f"a turn contains {end}, which ends a turn: {turn.text[:60]!r}; remove it")
        tokens = [*written, codec.turn_end]
        trajectory.add_sampled(Completion(tokens, logprobs=[0.0] * len(tokens), finished=True))
        trajectory.turns.append(turn)
        if turn.reply is not None:  # It is appended if a turn follows, as in `play`.
            shown = shown_reply(turn.reply)
            context = codec.reply(shown, after=codec.turn_end, max_tokens=max_reply_tokens)
    trajectory.stop = "malformed" if trajectory.answer is None else "answered"
    return trajectory


class PlayOne(Protocol):
    """Plays one game. `number`: the key of the question in `play_groups`; `sample`: 0 to `group_size` - 1."""

    def __call__(self, question: Question, *, number: int, sample: int) -> Awaitable[Trajectory]: ...


async def play_groups(
    questions: Mapping[int, Question], group_size: int, play_one: PlayOne
) -> list[list[Trajectory]]:
    """Play `group_size` games of each question, all concurrently. Returns P × G trajectories.

    `questions` has the questions by their numbers. The first error cancels the other games and is raised.
    """
    games = [
        play_one(question, number=number, sample=sample)
        for number, question in questions.items()
        for sample in range(group_size)
    ]
    trajectories = await run_together(games)
    return [trajectories[start : start + group_size] for start in range(0, len(games), group_size)]


async def run_together(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """Await several things concurrently, and return their results in order.

    The first error cancels the others. It is raised when all of them have ended, so that none of them goes on
    alone, or fails where nobody sees its error. (A TaskGroup would raise an ExceptionGroup.)
    """
    tasks = [asyncio.ensure_future(task) for task in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # This has no effect on a task that has ended.
        await asyncio.gather(*tasks, return_exceptions=True)
