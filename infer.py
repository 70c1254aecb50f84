"""Ask: the agent questions the environment, turn by turn, and answers.

    python infer.py --question "Who is the mother of the director of …?"
    python infer.py                              # asks you, question after question
    python infer.py --questions FILE --json      # .txt or .jsonl; one JSON object a line

Without other flags the newest mini run plays in its mini world; --agent and --env take any model and
environment.
"""

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TextIO

from prompt_r1.agent.agent import Agent, check_endpoint, check_question_lengths, open_agent
from prompt_r1.agent.names import resolve_agent
from prompt_r1.cli.command_line import parse_arguments, run_program
from prompt_r1.cli.dialogue import Dialogue, Game, as_json, cost_line
from prompt_r1.cli.question_input import questions_of, typed
from prompt_r1.config.fields import ServedConfig, setting
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.environments.opening import make_environment, parse_fields, parse_prices
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.protocol import parse
from prompt_r1.rollout import play
from prompt_r1.terminal import has_colours
from prompt_r1.types import Completion, Message, Question, Turn


@dataclass(frozen=True)
class InferConfig(ServedConfig):
    """Settings of infer.py."""

    EVERYDAY: ClassVar = (
        "question", "questions", "agent", "env", "json", "save", "seed", "temperature", "env_price",
    )  # fmt: skip

    question: str = setting("", "what to ask; -: each line of standard input")
    questions: str = setting("", "file of questions: .txt, one a line, or .jsonl with the field question")
    agent: str = setting(
        "", "run folder, model folder, hub id, mini, or MODEL@URL (default: newest mini run)"
    )
    env: str = setting("", "environment (default: the one the agent was trained with)")
    json: bool = setting(False, "print a JSON object for each question instead of the dialogue")
    save: str = setting("", "file for the transcript: .jsonl, or any other for text")
    seed: int = setting(-1, "seed of the mini world and of sampling (default: the run's)")
    temperature: float = setting(0.0, "0: greedy")
    env_args: str = setting("", 'fields of each request, as JSON: {"temperature": 0.7}')
    route: str = setting("session", "among several environments: session, uniform or weights (3,1)")
    env_timeout: float = setting(120.0, "seconds that one attempt of a call may take")
    env_price: tuple[str, ...] = setting(
        (), "IN,OUT in dollars per million tokens, for all environments or each"
    )
    device: str = setting("auto", "auto, cpu or cuda")


def main(arguments: list[str]) -> None:
    """Ask from a command line."""
    about = "Ask; the agent questions the environment, turn by turn, and answers."
    config = parse_arguments(InferConfig, "infer.py", about, arguments)
    asked = questions_of(question=config.question.strip(), file=config.questions)
    agent = resolve_agent(
        config.agent, kv_tokens=0, tokenizer=config.agent_tokenizer, prompts=config.agent_prompts
    )
    game = replace(agent.config, kv_tokens=agent.config.max_tokens)  # one game at a time
    seed = game.seed if config.seed < 0 else config.seed
    environment = environment_of(config, game, seed)
    with open_transcript(config.save) as file, asyncio.Runner() as runner:
        session = Session(config, game, seed, environment, str(agent.path), file)
        try:
            runner.run(environment.check())  # before a large agent is loaded
            runner.run(check_endpoint(agent))
            session.player = open_agent(replace(agent, config=game), pick_device(config.device))
            for text in asked or typed():
                runner.run(session.ask(text))
        except KeyboardInterrupt:
            session.end(session.games[-1] if session.games else None)
            sys.exit(130)
        finally:
            session.tell_total()
            runner.run(session.close())
    broken = [game for game in session.games if game.stop == "env_error"]
    if broken:
        raise Resumable(f"the environment {environment.name} failed in {len(broken)} of {len(session.games)} "
                        f"dialogues: {broken[0].error}; try again later")  # fmt: skip


class Session:
    """Plays one question after another, and shows, prints and saves each as the flags want it."""

    player: Agent | None = None  # once it is loaded

    def __init__(
        self, config: InferConfig, game: TrainConfig, seed: int, environment: Pool, agent: str, file: TextIO
    ) -> None:
        self.games: list[Game] = []
        self._config = config
        self._settings = game
        self._seed = seed
        self._environment = environment
        self._agent = agent
        self._lines = file if config.save.endswith(".jsonl") else None
        self._live = sys.stdout.isatty()
        self._begin = time.perf_counter()
        self._ended = 0
        # Whoever wants the dialogue as text: the screen, and the file of --save.
        self._views = [] if config.json else [Dialogue(_write_out, colours=has_colours(sys.stdout))]
        if config.save and self._lines is None:
            self._views.append(Dialogue(file.write, colours=False))

    async def close(self) -> None:
        """Close the connections of the agent and the environment."""
        await self._environment.close()
        if self.player is not None:
            await self.player.close()

    @property
    def _loaded(self) -> Agent:
        assert self.player is not None, "nothing is asked before the agent is loaded"
        return self.player

    async def ask(self, text: str) -> None:
        """One game. Raises UsageError for a question that is too long to play."""
        settings, codec = self._settings, self._loaded.codec
        question = Question("asked", "infer", text, answers=())
        check_question_lengths([question], codec, settings.max_tokens)
        game = Game(text)
        self.games.append(game)
        self._begin = time.perf_counter()
        for view in self._views:
            view.question(text)
        trajectory = await play(
            question, self._generate, self._reply, codec, settings.game, seed=str(self._seed)
        )
        game.stop, game.error = trajectory.stop, trajectory.error
        self.end(game)

    async def _generate(self, tokens: list[int], *, max_new: int, seed: str) -> Completion:
        game, codec = self.games[-1], self._loaded.codec

        def watch(token: int) -> None:
            game.spoken.append(token)
            if self._live and self._views:
                self._views[0].turn(codec.decode(game.spoken), ended=False)

        completion = await self._loaded.generate(
            tokens, max_new=max_new, seed=seed, temperature=self._config.temperature, watch=watch
        )
        text = codec.decode(completion.tokens)
        for view in self._views:
            view.turn(text, ended=True)
        game.turns.append(Turn(text, parse(text), reply=None))
        game.spoken = []
        return completion

    async def _reply(self, messages: list[Message]) -> str:
        game, begin = self.games[-1], time.perf_counter()
        reply = await self._environment.ask(messages, session=game.question)
        game.turns[-1] = replace(game.turns[-1], reply=reply, latency=time.perf_counter() - begin)
        for view in self._views:
            view.reply(reply)
        return reply

    def end(self, game: Game | None) -> None:
        """Tell how a game ended and what it cost; also one that was cut off."""
        if game is None or self._ended == len(self.games):
            return
        self._ended = len(self.games)
        if game.spoken:
            text = self._loaded.codec.decode(game.spoken)
            game.turns.append(Turn(text, parse(text), reply=None))
        game.cost = self._take_cost()
        for view in self._views:
            view.end_line()
            if game.stop != "answered":
                view.note("no answer", f"the game ended: {(game.error or game.stop).replace('_', ' ')}")
            view.note("cost", cost_line(game.cost))
        line = json.dumps(as_json(game, self._agent, self._environment.name))
        if self._config.json:
            _write_out(line + "\n")
        if self._lines is not None:
            self._lines.write(line + "\n")

    def tell_total(self) -> None:
        """After several questions: what they cost together."""
        costs = [game.cost for game in self.games if game.cost]
        if len(costs) < 2:
            return
        total: dict[str, float | None] = {name: sum(cost[name] or 0.0 for cost in costs) for name in costs[0]}
        if costs[0]["usd"] is None:
            total["usd"] = None
        for view in self._views:
            view.note("together", f"{len(costs)} questions, {cost_line(total)}")

    def _take_cost(self) -> dict[str, float | None]:
        """Calls, tokens, dollars (None without a price) and seconds since the last game."""
        counts = self._environment.take_metrics()
        usd = self._environment.budget.spent.usd - sum(game.cost.get("usd") or 0.0 for game in self.games)
        return {
            "calls": counts["env/paid"],
            "tokens_in": counts["env/tokens_in"],
            "tokens_out": counts["env/tokens_out"],
            "usd": usd if self._config.env_price else None,
            "seconds": time.perf_counter() - self._begin,
        }


def environment_of(config: InferConfig, game: TrainConfig, seed: int) -> Pool:
    """What is asked: by default what the agent was trained with."""
    return make_environment(
        config.env or game.env,
        seed=seed,
        attempt_timeout=config.env_timeout,
        fields=parse_fields(config.env_args or game.env_args),
        route=config.route,
        prices=parse_prices(config.env_price),
        device=config.device,
    )


def open_transcript(name: str) -> TextIO:
    """The file of --save, or one that swallows all. Raises UsageError where it cannot be written."""
    try:
        return Path(name or os.devnull).open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"--save {name}: {error.strerror}") from None


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    run_program(main)
