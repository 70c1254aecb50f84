"""Ask a question: the agent questions the environment over several turns, and answers.

    python infer.py --question "Who is the mother of the director of …?"
    python infer.py                              # prompts for questions, one after another
    python infer.py --questions FILE --json      # .txt or .jsonl; prints one JSON object per line

By default the agent of the newest mini run plays in its mini world; --agent and --env take any model and any
environment.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.cli.command_line import check_usage, infer_config

    check_usage(infer_config)

import asyncio
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from prompt_r1.agent.agent import Agent, check_endpoint, check_question_lengths, codec_of, open_agent
from prompt_r1.agent.names import resolve_agent
from prompt_r1.cli.command_line import infer_config, run_program
from prompt_r1.cli.dialogue import Dialogue, FinishedGame, GameCost, total_cost
from prompt_r1.cli.question_input import given_questions, typed_questions
from prompt_r1.config.fields import EnvironmentConfig
from prompt_r1.config.infer import InferConfig
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.environments.opening import open_for_agent
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.miniworld.hints import hint
from prompt_r1.rollout import play
from prompt_r1.terminal import has_colours, printable
from prompt_r1.types import Completion, Message, Question


def main(arguments: list[str]) -> None:
    """Ask questions from a command line."""
    config = infer_config(arguments)
    questions = given_questions(question=config.question.strip(), file=config.questions)
    spec = resolve_agent(
        config.agent, kv_tokens=0, tokenizer=config.agent_tokenizer, prompts=config.agent_prompts
    )
    # One game at a time needs no more KV cache than one game.
    spec = replace(spec, config=replace(spec.config, kv_tokens=spec.config.max_tokens))
    seed = spec.config.seed if config.seed < 0 else config.seed
    calls = EnvironmentConfig(
        env_args=config.env_args,
        route=config.route,
        env_timeout=config.env_timeout,
        env_price=config.env_price,
    )
    spec = spec.asking(config.env, calls)
    codec_of(spec)  # a missing agent is reported before the missing key of an environment
    device = pick_device(config.device)
    environment = open_for_agent(config.env, spec.config, calls, seed=seed, device=device)
    note = partial(print, file=sys.stderr, flush=True)
    note(printable(spec.describe(environment=environment.name, seed=seed)))
    with closing(Transcript(config.save)) as file, asyncio.Runner() as runner:
        try:
            runner.run(environment.check())  # before a large agent is loaded
            runner.run(check_endpoint(spec))
            agent = open_agent(spec, device)
            session = Session(config, agent, str(spec.path), environment, seed, file)
            try:
                for text in questions or typed_questions():
                    if spec.config.agent == "mini" and (known := hint(text, seed)):
                        note(known)
                    game = runner.run(session.ask(text))
                    if game.interrupted:
                        sys.exit(130)
            finally:
                session.show_total()
                runner.run(agent.close())
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            runner.run(environment.close())
    broken = [game for game in session.games if game.stop == "env_error"]
    if broken:
        raise Resumable(
            f"the environment {environment.name} failed in {len(broken)} of {len(session.games)} dialogues: "
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
    """Plays one question after another; shows, prints and saves each game as the flags say."""

    def __init__(
        self,
        config: InferConfig,
        agent: Agent,
        agent_name: str,
        environment: Pool,
        seed: int,
        file: Transcript,
    ) -> None:
        self.games: list[FinishedGame] = []
        self._config = config
        self._agent = agent
        self._agent_name = agent_name
        self._environment = environment
        self._seed = seed
        self._json_file = file if config.save.endswith(".jsonl") else None
        self._streaming = sys.stdout.isatty() and not config.json  # show tokens as they are sampled
        self._interrupted = False
        self._views: list[Dialogue] = []  # the screen first, then the transcript
        if not config.json:
            self._views.append(Dialogue(_write_out, colours=has_colours(sys.stdout)))
        if config.save and self._json_file is None:
            self._views.append(Dialogue(file.write, colours=False))

    async def ask(self, text: str) -> FinishedGame:
        """Play one game and write it. Raises UsageError for a question that is too long.

        Ctrl-C ends the game; what was played until then is written too.
        """
        agent, question = self._agent, Question("", "infer", text, answers=())
        check_question_lengths([question], agent.codec, agent.game.max_tokens)
        for view in self._views:
            view.question(text)
        begin = time.perf_counter()
        ask = partial(self._ask, session=text)
        trajectory = await play(question, self._generate, ask, agent.codec, agent.game, seed=str(self._seed))
        cost = self._take_cost(seconds=time.perf_counter() - begin)
        game = FinishedGame(trajectory, cost, self._interrupted)
        self.games.append(game)
        self._write(game)
        return game

    async def _generate(self, tokens: list[int], *, max_new: int, seed: str) -> Completion:
        """Let the agent write a turn, and show it; while it is sampled, if on a terminal."""
        sampled: list[int] = []

        def watch(token: int) -> None:
            sampled.append(token)
            if self._streaming:
                self._views[0].turn(self._agent.codec.turn_text(sampled), ended=False)

        temperature = self._config.temperature
        try:
            completion = await self._agent.generate(
                tokens, max_new=max_new, seed=seed, temperature=temperature, watch=watch
            )
        except asyncio.CancelledError:
            # Ctrl-C: return what there is, so that `play` ends and its trajectory can be shown and saved.
            self._interrupted = True
            completion = Completion(sampled, [0.0] * len(sampled), finished=False)
        for view in self._views:
            view.turn(self._agent.codec.turn_text(completion.tokens), ended=True)
        return completion

    async def _ask(self, messages: list[Message], *, session: str) -> str:
        """Ask the environment, and show its reply."""
        try:
            if self._interrupted:
                raise EnvError("interrupted")
            reply = await self._environment.ask(messages, session=session)
        except asyncio.CancelledError:
            self._interrupted = True
            raise EnvError("interrupted") from None
        for view in self._views:
            view.reply(reply)
        return reply

    def _write(self, game: FinishedGame) -> None:
        """Write how a game ended and its cost, and the game as JSON if wanted."""
        for view in self._views:
            if game.stop != "answered":
                view.note("no answer", f"the game ended: {(game.error or game.stop).replace('_', ' ')}")
            view.note("cost", str(game.cost))
        line = json.dumps(game.as_json(agent=self._agent_name, environment=self._environment.name)) + "\n"
        if self._config.json:
            _write_out(line)
        if self._json_file is not None:
            self._json_file.write(line)

    def show_total(self) -> None:
        """After several questions, show their total cost."""
        if len(self.games) < 2:
            return
        total = total_cost([game.cost for game in self.games])
        for view in self._views:
            view.note("total", f"{len(self.games)} questions, {total}")

    def _take_cost(self, *, seconds: float) -> GameCost:
        """The cost of the calls since the last game."""
        counts = self._environment.take_metrics()
        earlier = total_cost([game.cost for game in self.games])
        spent = self._environment.budget.spent
        return GameCost(
            counts["env/paid"],
            counts["env/tokens_in"],
            counts["env/tokens_out"],
            usd=spent.usd - (earlier.usd or 0.0) if self._config.env_price else None,
            seconds=seconds,
            lost_usd=spent.lost_usd - earlier.lost_usd,
        )


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    run_program(main)
