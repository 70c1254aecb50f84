"""Ask a question: the agent questions the environment over several turns, and answers.

    python infer.py --question "Who is the mother of the director of …?"
    python infer.py                              # prompts for questions, one after another
    python infer.py --json < FILE                # a question per line; prints one JSON object per line

By default the agent of the newest mini run plays in its mini world; --agent and --env take any model and any
environment.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.cli.installation import check_installation

    check_installation()
    from prompt_r1.cli.command_line import check_usage
    from prompt_r1.cli.question_input import check_infer

    check_usage(check_infer)

import asyncio
import json
import sys
from functools import partial

from prompt_r1.cli.command_line import run_program, teaching_command
from prompt_r1.cli.dialogue import Dialogue, game_as_json
from prompt_r1.cli.question_input import given_questions, typed_questions
from prompt_r1.config.fields import parse_arguments
from prompt_r1.config.pair import InferConfig
from prompt_r1.errors import Resumable
from prompt_r1.playing import OpenPair, open_pair
from prompt_r1.spending import Spending
from prompt_r1.terminal import printable
from prompt_r1.types import Trajectory

ACTION_TAGS = ("<interaction_prompt>", "<answer>")  # a turn that was cut off may have one, and no action
NO_FORMAT = "the agent wrote neither <interaction_prompt> nor <answer>: it does not know the format; "


def main(arguments: list[str]) -> None:
    """Ask questions from a command line."""
    config = parse_arguments(InferConfig, arguments)
    questions = given_questions(config.question)
    with asyncio.Runner() as runner:
        session = Session(config, open_pair(config, runner.run))
        try:
            for text in questions or typed_questions():
                runner.run(session.ask(text))
        finally:
            session.show_total()
    broken = [game for game in session.games if game.stop == "env_error"]
    if broken:
        raise Resumable(
            f"the environment {session.environment} failed in {len(broken)} of {len(session.games)} "
            f"dialogues: {broken[0].error}; try again later"
        )


class Session:
    """Plays one question after another, and prints each game: as text while it is played, or as JSON."""

    def __init__(self, config: InferConfig, pair: OpenPair) -> None:
        self.games: list[Trajectory] = []
        self.environment = pair.environment.name
        self._config = config
        self._pair = pair
        # With --json, only the games are printed.
        self._view = Dialogue((lambda text: None) if config.json else partial(print, end="", flush=True))
        print(printable(pair.about), file=sys.stderr, flush=True)

    async def ask(self, text: str) -> None:
        """Play one game and print it. Raises UsageError for a question that is too long."""
        budget, view = self._pair.environment.budget, self._view
        before = budget.spent
        view.question(text)
        try:
            game = await self._pair.play(text, on_piece=view.piece, on_turn_end=view.end_line)
        except asyncio.CancelledError:  # by Ctrl-C
            view.note("no answer", "interrupted")
            raise
        game.spent = budget.spent - before  # with attempts that were lost
        self.games.append(game)
        if self._config.json:
            names = {"agent": self._pair.path, "environment": self.environment}
            row = game_as_json(game, names, priced=bool(self._config.env_price))
            print(json.dumps(row), flush=True)
        if game.stop != "answered":
            view.note("no answer", f"the game ended: {(game.error or game.stop).replace('_', ' ')}")
        if game.turns and not any(tag in turn.text for turn in game.turns for tag in ACTION_TAGS):
            teach = teaching_command(self._config.agent or self._pair.path)
            view.note("format", f"{NO_FORMAT}`{teach}` teaches it")
        view.note("cost", f"{game.spent}, {game.seconds:.1f} s")

    def show_total(self) -> None:
        """After several questions, show their total cost."""
        if len(self.games) > 1:
            spent = sum((game.spent for game in self.games), Spending())
            seconds = sum(game.seconds for game in self.games)
            self._view.note("total", f"{len(self.games)} questions, {spent}, {seconds:.1f} s")


if __name__ == "__main__":
    run_program(main)
