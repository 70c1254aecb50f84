"""Ask a question: the agent questions the environment over several turns, and answers.

    python infer.py --question "Who is the mother of the director of …?"
    python infer.py                              # prompts for questions, one after another
    python infer.py --json < FILE                # a question per line; prints one JSON object per line

By default the agent of the newest mini run plays in its mini world; --agent and --env take any model and any
environment.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.pair.preflight import read_infer_config
    from prompt_r1.programs.command_line import read_settings

    settings = read_settings(read_infer_config)

import asyncio
import json
import sys
from functools import partial

from prompt_r1.errors import Resumable
from prompt_r1.pair.dialogue import Dialogue, game_as_json
from prompt_r1.pair.playing import OpenPair, open_pair
from prompt_r1.pair.question_input import given_questions, typed_questions
from prompt_r1.pair.settings import InferConfig
from prompt_r1.programs.command_line import run_program, teaching_command
from prompt_r1.programs.text import printable
from prompt_r1.types import Spending, Trajectory

ACTION_TAGS = ("<interaction_prompt>", "<answer>")  # a turn that was cut off may have one, and no action
NO_FORMAT = "the agent wrote neither <interaction_prompt> nor <answer>: it does not know the format; "


def main(config: InferConfig) -> None:
    """Ask the question of the command line, or those of standard input or the keyboard."""
    questions = given_questions(config.question)
    # With --json, only the games are printed.
    view = Dialogue((lambda text: None) if config.json else partial(print, end="", flush=True))
    games: list[Trajectory] = []
    with asyncio.Runner() as runner:
        pair = open_pair(config, runner.run)
        print(printable(pair.about), file=sys.stderr, flush=True)
        try:
            for text in questions or typed_questions():
                games.append(runner.run(ask(text, pair, view, config)))
        finally:
            if len(games) > 1:
                spent = sum((game.spent for game in games), Spending())
                seconds = sum(game.seconds for game in games)
                view.note("total", f"{len(games)} questions, {spent}, {seconds:.1f} s")
    broken = [game for game in games if game.stop == "env_error"]
    if broken:
        raise Resumable(
            f"the environment {pair.environment.name} failed in {len(broken)} of {len(games)} dialogues: "
            f"{broken[0].error}; try again later"
        )


async def ask(text: str, pair: OpenPair, view: Dialogue, config: InferConfig) -> Trajectory:
    """Play one game, and print it while it is played, or as JSON. Raises UsageError for a long question."""
    before = pair.environment.budget.spent
    view.question(text)
    try:
        game = await pair.play(text, on_piece=view.piece)
    except asyncio.CancelledError:  # by Ctrl-C
        view.note("no answer", "interrupted")
        raise
    game.spent = pair.environment.budget.spent - before  # with attempts that were lost
    if config.json:
        names = {"agent": pair.path, "environment": pair.environment.name}
        print(json.dumps(game_as_json(game, names, priced=bool(config.env_price))), flush=True)
    if game.stop != "answered":
        view.note("no answer", f"the game ended: {(game.error or game.stop).replace('_', ' ')}")
    if game.turns and not any(tag in turn.text for turn in game.turns for tag in ACTION_TAGS):
        view.note("format", f"{NO_FORMAT}`{teaching_command(config.agent or pair.path)}` teaches it")
    view.note("cost", f"{game.spent}, {game.seconds:.1f} s")
    return game


if __name__ == "__main__":
    run_program(main, settings)
