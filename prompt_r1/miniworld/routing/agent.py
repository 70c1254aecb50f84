"""`--agent mini-route`: a mini agent that has learned to name the environment it asks.

It differs from the mini agent in its demonstrations only: they name an environment in each prompt, drawn at
random whatever the question, so the agent knows both names and prefers neither. The prices that they are told
are always the same. (With prices drawn at random the instruction has no constant length, and the small agent
does not learn to copy numbers from the question.)

No colon follows a name. After `@mini` the model then chooses between `-small` and the first word of the
request, so its hidden state there depends on the request. With a colon the choice needed nothing of the
request, its gradients were the same for all requests (cosine 0.997 or more), and training could only prefer
one name for all.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from prompt_r1.miniworld import agent as plain
from prompt_r1.miniworld.demonstrations import demonstrate
from prompt_r1.miniworld.environment import MiniEnvironment, MiniReply
from prompt_r1.miniworld.questions import make_questions
from prompt_r1.miniworld.routing.small import SmallEnvironment
from prompt_r1.miniworld.tokenizer import plain_text
from prompt_r1.miniworld.world import make_world
from prompt_r1.options.routes import route_instruction
from prompt_r1.protocol import parse
from prompt_r1.types import Question, Turn

ENVIRONMENTS = "mini,mini-small"
PRICES = ("2,8", "0.1,0.4")
TOLD = f"{plain.INSTRUCTION}\n{route_instruction(ENVIRONMENTS, PRICES)}"


class AnyEnvironment(MiniEnvironment):
    """Asks one of the two environments, drawn for each prompt, and remembers their names in order."""

    def __init__(self, world_seed: int | str, rng: random.Random) -> None:
        world = make_world(world_seed)
        super().__init__(world, "A", seed=world_seed)
        self.asked: list[str] = []
        self._members = (
            MiniEnvironment(world, "A", seed=world_seed),
            SmallEnvironment(world, seed=world_seed),
        )
        self._rng = rng

    def reply(self, prompt: str, skills: object = None) -> MiniReply:
        member = self._rng.choice(self._members)
        self.asked.append(member.name)
        return member.reply(prompt)


def build_agent(
    seed: int,
    *,
    worlds: int = 30,
    games: int = 400,
    steps: int = 2500,
    batch_size: int = 8,
    progress: bool = True,
) -> plain.MiniAgent:
    """As `miniworld.agent.build_agent`, from demonstrations that name an environment in each prompt.

    With the names it takes more steps to learn to copy from replies: after 40 steps of GRPO the validation EM
    was 0.89 with a warm start of 1,500 steps, and 0.94 with 2,500 (seed 0).
    """
    shown = list(_demonstrations(seed, worlds, games))
    texts = (f"{plain_text(question, turns)}\n{TOLD}" for question, turns in shown[:5000])
    return plain.learn_from(
        shown, texts, TOLD, seed=seed, steps=steps, batch_size=batch_size, progress=progress
    )


def mini_route_agent(seed: int, cache_dir: Path) -> Path:
    """The Hugging Face folder of the agent, which the first call builds and keeps in `cache_dir`."""
    folder = cache_dir / f"mini-route-agent-{seed}-{source_digest()}"
    task = f"the mini-route agent of seed {seed}: about three minutes"
    return plain.kept_agent(folder, partial(build_agent, seed), task)


def source_digest() -> str:
    """A digest of the code that shapes the agent: that of the mini agent, and what makes it another one."""
    folder = Path(__file__).parent
    codes = [plain.code_of(path.read_text("utf-8")) for path in sorted(folder.glob("*.py"))]
    codes += [TOLD, plain.source_digest()]
    return hashlib.sha256("".join(codes).encode()).hexdigest()[:12]


def _demonstrations(seed: int, worlds: int, games: int) -> Iterator[tuple[Question, list[Turn]]]:
    """Games in the worlds of the mini agent's warm start, with its strategies."""
    for number in range(worlds):
        world_seed = f"warm start {seed} world {number}"
        environment = AnyEnvironment(world_seed, random.Random(f"routes {world_seed}"))
        rng = random.Random(f"demonstrations {world_seed}")
        for mini in make_questions(environment.world, "train", games, world_seed):
            environment.asked.clear()
            turns = demonstrate(mini, environment, rng)
            yield mini.question, with_names(turns, environment.asked)


def with_names(turns: list[Turn], names: list[str]) -> list[Turn]:
    """The turns with the name of the environment in front of each prompt that was sent."""
    named, left = [], iter(names)
    for turn in turns:
        if turn.reply is not None:
            tag = "<interaction_prompt>"
            text = turn.text.replace(tag, f"{tag} @{next(left)}", 1)
            turn = replace(turn, text=text, action=parse(text))
        named.append(turn)
    return named
