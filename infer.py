"""Ask one question: the agent questions the environment, turn by turn, and answers.

    python infer.py --question "Who is the mother of the director of …?"

Without other flags the newest mini run plays in its mini world; --agent and --env take any model and
environment.
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from prompt_r1.agents import know_agent
from prompt_r1.command_line import parse_arguments, run
from prompt_r1.config import TrainConfig
from prompt_r1.distributed import pick_device
from prompt_r1.environments import make_environment, parse_fields
from prompt_r1.environments.pool import Pool
from prompt_r1.knobs import ServedConfig, knob
from prompt_r1.players import Player, check_fit, check_served, load_known
from prompt_r1.protocol import parse
from prompt_r1.rollout import play
from prompt_r1.types import Completion, Environment, Message, Question, Resumable, Trajectory, UsageError


@dataclass(frozen=True)
class InferConfig(ServedConfig):
    """Settings of infer.py."""

    EVERYDAY: ClassVar = ("question", "agent", "env", "json", "seed", "temperature")

    question: str = knob("", "what to ask")
    agent: str = knob("", "run folder, model folder, hub id, mini, or MODEL@URL (default: newest mini run)")
    env: str = knob("", "environment (default: the one the agent was trained with)")
    json: bool = knob(False, "print one JSON object instead of the dialogue")
    seed: int = knob(-1, "seed of the mini world and of sampling (default: the run's)")
    temperature: float = knob(0.0, "0: greedy")
    env_args: str = knob("", 'fields of each request, as JSON: {"temperature": 0.7}')
    route: str = knob("session", "among several environments: session, uniform or weights (3,1)")
    env_timeout: float = knob(120.0, "seconds that one attempt of a call may take")
    device: str = knob("auto", "auto, cpu or cuda")


def main(arguments: list[str]) -> None:
    """Ask one question from a command line."""
    config = parse_arguments(
        InferConfig,
        "infer.py",
        "Ask one question; the agent questions the environment and answers.",
        arguments,
    )
    question = Question("asked", "infer", config.question.strip(), answers=())
    if not question.text:
        raise UsageError('nothing to ask: give --question "…"')
    agent = know_agent(
        config.agent, kv_tokens=0, tokenizer=config.agent_tokenizer, prompts=config.agent_prompts
    )
    game = agent.game
    seed = game.seed if config.seed < 0 else config.seed
    environment = environment_of(config, game, seed)
    asyncio.run(environment.check())  # before a large agent is loaded
    asyncio.run(check_served(agent))
    player = load_known(agent, pick_device(config.device))
    check_fit([question], player.codec, game.max_tokens)

    if not config.json:
        print(f"question     {question.text}\n")
    trajectory = asyncio.run(dialogue(question, player, environment, config, game, seed))
    if config.json:
        print(json.dumps(as_json(trajectory, str(agent.path), environment)))
    if trajectory.stop == "env_error":
        raise Resumable(f"the environment {environment.name} failed: {trajectory.error}; try again later")
    if trajectory.stop != "answered" and not config.json:
        print(f"no answer    the game ended: {trajectory.stop.replace('_', ' ')}")


async def dialogue(
    question: Question, player: Player, environment: Pool, config: InferConfig, game: TrainConfig, seed: int
) -> Trajectory:
    """One game, shown as it goes on unless it is wanted as JSON."""

    async def generate(tokens: list[int], *, max_new: int, seed: str) -> Completion:
        completion = await player.generate(
            tokens, max_new=max_new, seed=seed, config=game, temperature=config.temperature
        )
        if not config.json:
            show_turn(player.codec.decode(completion.tokens))
        return completion

    async def ask(messages: list[Message]) -> str:
        reply = await environment.ask(messages, session=question.text)
        if not config.json:
            print(f"environment  {reply}\n")
        return reply

    try:
        return await play(
            question,
            generate,
            ask,
            player.codec,
            max_turns=game.max_turns,
            max_tokens=game.max_tokens,
            max_new=game.max_new,
            max_reply=game.max_reply_tokens,
            force_answer=game.force_answer,
            seed=str(seed),
        )
    finally:
        await environment.close()
        await player.close()


def environment_of(config: InferConfig, game: TrainConfig, seed: int) -> Pool:
    """What is asked: by default what the agent was trained with."""
    return make_environment(
        config.env or game.env,
        seed=seed,
        attempt_timeout=config.env_timeout,
        fields=parse_fields(config.env_args or game.env_args),
        route=config.route,
        device=config.device,
    )


def show_turn(text: str) -> None:
    """One turn of the agent, by its blocks; a turn without any is printed as it is."""
    action = parse(text)
    if action.think is not None:
        print(f"agent thinks {action.think}")
    if action.answer is not None:
        print(f"answer       {action.answer}")
    elif action.prompt is not None:
        print(f"agent asks   {action.prompt}")
    else:
        print(f"agent writes {text}")


def as_json(trajectory: Trajectory, agent: str, environment: Environment) -> dict[str, object]:
    """The dialogue for programs. `answer` is null when there was none; `stop`: how the game ended."""
    return {
        "question": trajectory.question.text,
        "answer": trajectory.answer,
        "stop": trajectory.stop,
        "error": trajectory.error,
        "turns": [asdict(turn) for turn in trajectory.turns],
        "agent": agent,
        "environment": environment.name,
    }


if __name__ == "__main__":
    run(main)
