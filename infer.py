"""Ask a question: the agent questions the environment over several turns, and answers.

    python infer.py --question "Who is the mother of the director of …?"
    python infer.py                              # prompts for questions, one after another
    python infer.py --questions FILE --json      # .txt or .jsonl; prints one JSON object per line

By default the agent of the newest mini run plays in its mini world; --agent and --env take any model and any
environment.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.cli.command_line import check_usage
    from prompt_r1.config.infer import infer_config

    check_usage(infer_config)

import asyncio
import json
import os
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from prompt_r1.agent.agent import check_question_lengths
from prompt_r1.agent.names import resolve_agent
from prompt_r1.cli.command_line import run_program
from prompt_r1.cli.dialogue import Dialogue, cost_line, game_as_json
from prompt_r1.cli.question_input import given_questions, typed_questions
from prompt_r1.config.infer import InferConfig, infer_config
from prompt_r1.errors import INTERRUPTED, Resumable, UsageError
from prompt_r1.playing import OpenPair, PlaySettings, open_pair, play_question
from prompt_r1.spending import Spending
from prompt_r1.terminal import has_colours, printable
from prompt_r1.types import Question, Trajectory


def main(arguments: list[str]) -> None:
    """Ask questions from a command line."""
    config = infer_config(arguments)
    questions = given_questions(question=config.question.strip(), file=config.questions)
    spec = resolve_agent(config.agent, kv_tokens=0)
    # One game at a time needs no more KV cache than one game.
    spec = replace(spec, config=replace(spec.config, kv_tokens=spec.config.max_tokens))
    note = partial(print, file=sys.stderr, flush=True)
    with closing(Transcript(config.save)) as file, asyncio.Runner() as runner:
        try:
            pair = open_pair(spec, config.env, config, seed=config.seed, device=config.device, run=runner.run)
            environment = pair.environment.name
            note(printable(spec.describe(environment=environment, seed=pair.seed)))
            session = Session(config, pair, {"agent": str(spec.path), "environment": environment}, file)
            try:
                for text in questions or typed_questions():
                    game = runner.run(session.ask(text))
                    if game.error == INTERRUPTED:
                        sys.exit(130)
            finally:
                session.show_total()
        except KeyboardInterrupt:
            sys.exit(130)
    broken = [game for game in session.games if game.stop == "env_error" and game.error != INTERRUPTED]
    if broken:
        raise Resumable(
            f"the environment {environment} failed in {len(broken)} of {len(session.games)} dialogues: "
            f"{broken[0].error}; try again later"
        )


class Transcript:
    """The file of --save, or the null device. The first write replaces what an existing file held."""

    def __init__(self, name: str) -> None:
        """Open the file without changing it. Raises UsageError if it cannot be written."""
        path = Path(name or os.devnull)
        try:
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UsageError(f"--save {name}: {error.strerror}") from None
        self._has_old_text = path.is_file()  # a device or a pipe cannot be truncated

    def write(self, text: str) -> None:
        """Append to the texts written so far."""
        if self._has_old_text:
            self._file.truncate(0)
            self._has_old_text = False
        self._file.write(text)

    def close(self) -> None:
        self._file.close()


class Session:
    """Plays one question after another; shows, prints and saves each game as the flags say.

    A listener of the games: it shows them while they are played.
    """

    def __init__(self, config: InferConfig, pair: OpenPair, names: dict[str, str], file: Transcript) -> None:
        self.games: list[Trajectory] = []
        self._config = config
        self._pair = pair
        self._names = names  # of agent and environment, for JSON
        self._json_file = file if config.save.endswith(".jsonl") else None
        self.wants_tokens = sys.stdout.isatty() and not config.json
        self._views: list[Dialogue] = []  # the screen first, then the transcript
        if not config.json:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
            self._views.append(Dialogue(_write_out, colours=has_colours(sys.stdout), width=width))
        if config.save and self._json_file is None:
            self._views.append(Dialogue(file.write, colours=False))

    async def ask(self, text: str) -> Trajectory:
        """Play one game and write it. Raises UsageError for a question that is too long.

        Ctrl-C ends the game; what was played until then is written too.
        """
        agent, environment = self._pair.agent, self._pair.environment
        check_question_lengths([Question("", "infer", text, ())], agent.codec, agent.game)
        for view in self._views:
            view.question(text)
        how, before = PlaySettings(self._config.temperature, keep_interrupted=True), environment.budget.spent
        question = Question(text, "infer", text, answers=())
        seed = str(self._pair.seed)
        game = await play_question(agent, environment, question, how, seed=seed, listener=self)
        game.spent = environment.budget.spent - before  # with attempts that were lost
        self.games.append(game)
        self._write(game)
        return game

    def turn(self, text: str, *, ended: bool) -> None:
        """Show the agent's turn; until it has ended, on the screen only."""
        for view in self._views if ended else self._views[:1]:
            view.turn(text, ended=ended)

    def reply(self, text: str) -> None:
        """Show the environment's reply."""
        for view in self._views:
            view.reply(text)

    def _write(self, game: Trajectory) -> None:
        """Write how a game ended and its cost, and the game as JSON if wanted."""
        priced = bool(self._config.env_price)
        for view in self._views:
            if game.stop != "answered":
                reason = (game.error or game.stop).replace("_", " ")
                view.note("no answer", f"the game ended: {reason}")
            view.note("cost", cost_line(game.spent, game.seconds, priced=priced))
        line = json.dumps(game_as_json(game, self._names, priced=priced)) + "\n"
        if self._config.json:
            _write_out(line)
        if self._json_file is not None:
            self._json_file.write(line)

    def show_total(self) -> None:
        """After several questions, show their total cost."""
        if len(self.games) < 2:
            return
        spent = sum((game.spent for game in self.games), Spending())
        seconds = sum(game.seconds for game in self.games)
        total = cost_line(spent, seconds, priced=bool(self._config.env_price))
        for view in self._views:
            view.note("total", f"{len(self.games)} questions, {total}")


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    run_program(main)
