"""Ask a question: the agent questions the environment over several turns, and answers.

    python infer.py --question "Who is the mother of the director of …?"
    python infer.py                              # prompts for questions, one after another
    python infer.py --json < FILE                # a question per line; prints one JSON object per line

By default the agent of the newest mini run plays in its mini world; --agent and --env name others.
"""

if __name__ == "__main__":  # Show --help and usage errors before the imports below, which take seconds.
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.pair.settings import InferConfig, read_pair
    from prompt_r1.programs.command_line import begin_imports, read_settings

    chosen = read_settings(lambda arguments: read_pair(InferConfig, arguments))
    begin_imports()

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

from prompt_r1.errors import QuestionTooLong, Resumable, UsageError
from prompt_r1.pair.api import AsyncPair, asked_question, open_pair
from prompt_r1.pair.dialogue import DialoguePrinter, OnPiece
from prompt_r1.pair.named_agent import teaching_command
from prompt_r1.pair.settings import ChosenPair, InferConfig
from prompt_r1.programs.command_line import exit_with, run_program
from prompt_r1.programs.reading import json_object
from prompt_r1.programs.text import printable
from prompt_r1.types import Trajectory

NO_ANSWER = 3  # the exit code if a game ended without an answer
# An agent that knows the format begins an action with one of these tags, unless its turn is cut off before.
ACTION_TAGS = ("<interaction_prompt>", "<answer>")


def main(chosen: ChosenPair[InferConfig]) -> None:
    """Ask the question of the command line, or the questions of standard input or the keyboard."""
    config = chosen.config
    questions = given_questions(config.question) or typed_questions()
    printer = DialoguePrinter(show)
    games: list[Trajectory] = []
    with asyncio.Runner() as runner:
        pair = runner.run(open_pair(chosen))
        print(printable(pair.about), file=sys.stderr, flush=True)
        try:
            for question in questions:
                if config.json:
                    game = runner.run(ask(question, pair))
                    print(json.dumps(game_as_json(game, pair, priced=any(config.env_price))), flush=True)
                else:
                    game = runner.run(ask_and_show(question, pair, printer, config.agent or pair.path))
                games.append(game)
        finally:
            if len(games) > 1 and not config.json:
                printer.note("total", f"{len(games)} questions, {pair.environment.budget.charged}")
            runner.run(pair.environment.close())
    broken = [game for game in games if game.stop == "env_error"]
    if broken:
        raise Resumable(  # exit code 75: a later try may succeed
            f"the environment {pair.environment.name} failed in {len(broken)} of {len(games)} dialogues; "
            f"the first: {broken[0].error}; try again later"
        )
    without_answer = sum(game.answer is None for game in games)
    if without_answer:
        exit_with(NO_ANSWER, f"{without_answer} of {len(games)} questions got no answer")


def given_questions(question: str) -> list[str]:
    """The question, or the lines of standard input; [] if a user will type questions."""
    if question.strip():
        return [question.strip()]
    if sys.stdin.isatty():
        return []
    try:
        text = sys.stdin.read()
        # A byte that is not UTF-8 was read as a lone surrogate. encode() raises an error for it.
        text.encode()
    except UnicodeError:
        raise UsageError("standard input is not UTF-8") from None
    questions = [line.strip() for line in text.split("\n") if line.strip()]
    if not questions:
        raise UsageError('nothing to ask: give --question "…", or lines on standard input')
    if "question" in json_object(questions[0]):
        raise UsageError("standard input holds JSON: give each question as a line of text")
    return questions


def typed_questions() -> Iterator[str]:
    """Ask for questions at the keyboard until an empty line or the end of input."""
    with suppress(ImportError):  # A Python may be built without it.
        import readline  # noqa: F401  (editing and history for input)

    with suppress(EOFError):
        while True:
            # input() would write the prompt to stdout, into a file of games.
            print("\nask (an empty line ends):", file=sys.stderr, flush=True)
            question = input().strip()
            if not question:
                return
            yield question


async def ask(question: str, pair: AsyncPair, on_piece: OnPiece | None = None) -> Trajectory:
    """Play one game. If the question is too long, the game has no turns, and its `error` says so."""
    try:
        return await pair.play(question, on_piece=on_piece)
    except QuestionTooLong as error:  # Other questions can still be asked.
        return Trajectory(asked_question(question), stop="max_tokens", error=str(error))


async def ask_and_show(question: str, pair: AsyncPair, printer: DialoguePrinter, agent: str) -> Trajectory:
    """Play one game, print it while it is played, and say how it ended. `agent` is what the user calls it."""
    printer.question(question)
    try:
        game = await ask(question, pair, printer.piece)
    except asyncio.CancelledError:  # The user pressed Ctrl-C.
        printer.note("no answer", "interrupted")
        raise
    if game.stop != "answered":
        reason = game.error or str(game.stop).replace("_", " ")
        printer.note("no answer", f"the game ended: {reason}")
    if game.turns and not has_action_tag(game):
        tags = " nor ".join(ACTION_TAGS)
        reason = f"it does not know the format; `{teaching_command(agent)}` teaches it"
        if game.stop == "max_tokens":
            reason = f"it was cut off before (give a larger --max-new), or {reason}"
        printer.note("format", f"the agent wrote neither {tags}: {reason}")
    printer.note("cost", f"{game.charged}, {game.seconds:.1f} s")
    return game


def has_action_tag(game: Trajectory) -> bool:
    """Whether the agent has written a tag of the format in any turn."""
    return any(tag in turn.text for turn in game.turns for tag in ACTION_TAGS)


def show(text: str) -> None:
    """Print a part of the dialogue at once."""
    print(text, end="", flush=True)


def game_as_json(game: Trajectory, pair: AsyncPair, *, priced: bool) -> dict[str, object]:
    """A game as an object for other programs.

    `answer` is null if the game ended without an answer, and `usd` is null if calls have no price. The costs
    include requests whose reply was lost.
    """
    return {
        "question": game.question.text,
        "answer": game.answer,
        "stop": game.stop,
        "error": game.error,
        "turns": [asdict(turn) for turn in game.turns],
        "agent": pair.path,
        "environment": pair.environment.name,
        **asdict(game.charged),
        "usd": game.charged.usd if priced else None,
        "seconds": game.seconds,
    }


if __name__ == "__main__":
    run_program(main, chosen)
