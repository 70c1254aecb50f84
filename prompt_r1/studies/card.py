"""`python -m prompt_r1.studies card --env mini-neural`: what a neural environment can answer.

For each kind of question, how often the reply to it, as it is and asked step by step, holds the right value,
with a 95 % interval (Wilson). The *ceiling* of asking step by step is the product of the shares of its steps.
No agent plays: the steps are the demonstrator's, with the right value of the step before.

With --games FILE … (of runs/*/trajectories), the wordings of an agent's requests instead: how often it used
each, and how often the environment's replies to it were right.
"""

import argparse
import asyncio
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch

from prompt_r1.cli.command_line import program_name
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.environment import NEURAL
from prompt_r1.config.fields import POSITIVE, check_number
from prompt_r1.environments.local import load_local
from prompt_r1.environments.sources import ReplySource
from prompt_r1.metrics.statistics import wilson
from prompt_r1.miniworld.beliefs import Skills
from prompt_r1.miniworld.demonstrations import decompose
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.questions import TRAINING_MIX, Pop, draw_slots, put_into_words
from prompt_r1.miniworld.world import World, neural_world

# The rule-based environment with these skills knows the right value of every request that it understands.
PERFECT = Skills(clear=1, sum=1, hops=1, casual=1, compare=1, problem=1, details=1)
OTHER_WORDINGS = {"polite": "Please tell me the {relation} of {film}.", "bare": "{film}: {relation}?"}
LEAST_USED = 0.01  # of all requests: rarer wordings are not shown


def main(arguments: list[str]) -> None:
    """Print the card from a command line."""
    name = program_name("python -m prompt_r1.studies")
    parser = argparse.ArgumentParser(f"{name} card", description=__doc__)
    parser.add_argument("--env", nargs="+", default=list(NEURAL), help="mini-neural, mini-neural-b or hf:DIR")
    parser.add_argument("--questions", type=int, default=400, help="of each kind (400)")
    parser.add_argument("--games", nargs="+", type=Path, help="files of runs/*/trajectories")
    given = parser.parse_args(arguments)
    check_number("--questions", given.questions, POSITIVE)
    world = neural_world()
    if given.games:
        print(wordings_table(given.games, world))
        return
    torch.set_num_threads(1)
    requests = {kind: list(requests_of(kind, world, given.questions)) for kind in TRAINING_MIX}
    cards = {}
    for spec in given.env:
        source = load_local(spec, fields={}, system="", seed=0, slots=16, device=torch.device("cpu"))
        cards[spec] = {kind: asyncio.run(measure(source, requests[kind])) for kind in TRAINING_MIX}
    print(card_table(cards, given.questions))


def requests_of(kind: str, world: World, count: int) -> Iterator[dict[str, tuple[str, str]]]:
    """For each of `count` questions, the ways to ask it: a request, and the value in a right reply."""
    rng, oracle = random.Random(f"card {kind}"), MiniEnvironment(world)
    films = world.train.films + world.test.films
    for _ in range(count):
        slots = draw_slots(kind, world, films, rng)
        text = put_into_words(slots, rng)
        asked = {"as it is": (text, oracle.reply(text, PERFECT).value)}
        value = ""
        for number, step in enumerate(decompose(slots), start=1):
            prompt = step.prompt.format(value=value)
            value = oracle.reply(prompt, PERFECT).value
            asked[f"step {number}"] = prompt, value
        if isinstance(slots, Pop):
            for name, wording in OTHER_WORDINGS.items():
                asked[name] = wording.format(film=slots.film, relation=slots.relation), value
        yield asked


async def measure(source: ReplySource, requests: Sequence[dict[str, tuple[str, str]]]) -> dict[str, int]:
    """The number of right replies to each way of asking."""
    rights = {}
    for way in requests[0]:
        prompts, values = zip(*(asked[way] for asked in requests), strict=True)
        replies = await asyncio.gather(
            *(source.call([{"role": "user", "content": prompt}]) for prompt in prompts)
        )
        rights[way] = sum(holds(reply.text, value) for reply, value in zip(replies, values, strict=True))
    return rights


def card_table(cards: dict[str, dict[str, dict[str, int]]], asked: int) -> str:
    """A row for each way of asking and each ceiling, a column for each environment."""
    first, lines = next(iter(cards.values())), []
    ceilings: dict[str, list[float]] = defaultdict(list)
    for kind, ways in first.items():
        for way in ways:
            cells = []
            for rights in cards.values():
                low, high = wilson(rights[kind][way], asked)
                cells.append(f"{rights[kind][way] / asked:.2f} [{low:.2f}, {high:.2f}]")
            lines.append([f"{kind}, {way}", *cells])
        for spec, rights in cards.items():
            steps = [right / asked for way, right in rights[kind].items() if way.startswith("step")]
            ceilings[spec].append(prod(steps))
        lines.append([f"**{kind}, ceiling**", *(f"{each[-1]:.2f}" for each in ceilings.values())])
    lines.append(["**mean ceiling**", *(f"{sum(each) / len(each):.3f}" for each in ceilings.values())])
    return markdown_table(["question", *cards], lines)


def wordings_table(files: Iterable[Path], world: World) -> str:
    """The wordings of the requests in recorded games, the most frequent first."""
    oracle = MiniEnvironment(world)
    names = sorted({*world.names.values(), *world.facts.values()} - {""}, key=len, reverse=True)
    slots = re.compile("|".join(map(re.escape, [name for name in names if name.istitle()])) + r"|\b\d+\b")
    relations = re.compile(r"\b(director|composer|star|mother|spouse|teacher|birthplace)\b")
    marks: dict[str, list[bool]] = defaultdict(list)
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            for turn in json.loads(line)["turns"]:
                prompt, reply = turn["action"]["prompt"], turn["reply"]
                if prompt is not None and reply is not None:
                    value = oracle.reply(prompt, PERFECT).value
                    wording = relations.sub("RELATION", slots.sub("…", prompt))
                    marks[wording].append(bool(value) and holds(reply, value))
    total = sum(map(len, marks.values()))
    lines = [
        [wording, f"{len(each) / total:.3f}", f"{sum(each) / len(each):.2f}"]
        for wording, each in sorted(marks.items(), key=lambda item: -len(item[1]))
        if len(each) >= LEAST_USED * total
    ]
    return markdown_table(["wording", "share of the requests", "right replies"], lines)


def holds(reply: str, value: str) -> bool:
    """Whether a reply contains a value as whole words."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", reply, re.IGNORECASE) is not None
