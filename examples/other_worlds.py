"""Train a tiny agent on a task that we did not write: `python -m examples.other_worlds chain_sum --seed 0`.

It makes scripted games (`games.jsonl`) and a random Qwen3 (`new/`), then runs two commands, which it prints:
the warm start on the games, and the training. The tasks are chain_sum of reasoning-gym, with the calculator
below as the environment, and GuessTheNumber-v0 and Mastermind-v0 of TextArena, which are their own
environments. The games are imperfect, like those of the mini world: most strategies fail, and GRPO finds the
one that works.
"""

import argparse
import asyncio
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from itertools import permutations
from operator import eq
from pathlib import Path
from statistics import mean

from prompt_r1.data.questions import find_questions
from prompt_r1.environments.sources import FreeSource
from prompt_r1.miniworld.agent import new_model
from prompt_r1.miniworld.tokenizer import plain_text, train_tokenizer
from prompt_r1.protocol import parse
from prompt_r1.tasks.text_arena import TextArenaEnvironment
from prompt_r1.types import Message, Question, Turn

GAMES = 6_000
SEEDS_APART = 1_000  # scripted games have the questions of a run with a seed that is larger by this
TASKS = {
    "chain_sum": ("reasoning_gym:chain_sum", "py:examples.other_worlds:Calculator"),
    "GuessTheNumber-v0": ("textarena:GuessTheNumber-v0", "textarena"),
    "Mastermind-v0": ("textarena:Mastermind-v0", "textarena"),
}
SIZES = {
    "chain_sum": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "Mastermind-v0": {"code_length": 2, "num_numbers": 6},
}
WARM_START = (
    "--preset mini --rank 0 --lr 3e-3 --epochs 2 --batch-size 8 --micro-batch 8 --checkpointing=false "
    "--device cpu"
)
TRAINING = "--config mini --max-turns 5 --max-tokens 512 --val-every 10 --device cpu"

# A script yields the think block, the tag and the content of each turn, and is sent the reply.
Script = Generator[tuple[str, str, str], str, None]
ASK, ANSWER = "interaction_prompt", "answer"
NUMBER = re.compile(r"-?\d+")


class Calculator:
    """An environment that computes one operation on two integers."""

    def ask(self, messages: list[Message]) -> str:
        asked = re.fullmatch(r"(-?\d+) ([+*-]) (-?\d+)", messages[-1]["content"].strip())
        if asked is None:
            return "I need one operation on two numbers."
        left, right = int(asked[1]), int(asked[3])
        result = {"+": left + right, "-": left - right, "*": left * right}[asked[2]]
        return f"It is {result} then."  # with blanks around it, a number has the same tokens everywhere


def chain_sum_script(question: Question, rng: random.Random) -> Script:
    """Ask the whole sum, or one operation after the other."""
    expression = question.text.split(": ")[1].removesuffix(" =")
    value, *terms = re.findall(r"^-?\d+|[+-] -?\d+", expression)
    strategies = {"as it is": 0.5, "step by step": 0.3, "stop early": 0.1, "guess": 0.1}
    strategy = rng.choices(list(strategies), list(strategies.values()))[0]
    if strategy == "as it is":
        yield "I ask it as it is.", ASK, expression
    elif strategy == "guess":
        value = str(rng.randint(-99, 199))
    else:
        for number, term in enumerate(terms[:1] if strategy == "stop early" else terms):
            reply = yield "Now the next one." if number else "First the first two.", ASK, f"{value} {term}"
            [value] = NUMBER.findall(reply)
    yield "Now I answer.", ANSWER, value


def number_script(question: Question, rng: random.Random) -> Script:
    """Halve the range, or try numbers at random; then answer a number that is still possible."""
    low, high = map(int, re.findall(r"between (\d+) and (\d+)", question.text)[0])
    first, last, halves = low, high, rng.random() < 0.3
    for _ in range(4 if halves else rng.randint(1, 4)):
        guess = (low + high) // 2 if halves else rng.randint(first, last)
        reply = yield "I halve it." if halves else "I try one.", ASK, f"[{guess}]"
        if "higher" in reply:
            low = max(low, guess + 1)
        elif "lower" in reply:
            high = min(high, guess - 1)
        elif "Congratulations" in reply:
            low = high = guess
        if low >= high:
            break
    yield "Now I answer.", ANSWER, str(rng.randint(low, max(low, high)))


def code_script(question: Question, rng: random.Random) -> Script:
    """Try the first code that is still possible, or codes at random; then answer a possible one."""
    [(length, most)] = re.findall(r"(\d+) digits long, each digit from 1 to (\d+)", question.text)
    codes = list(permutations(range(1, int(most) + 1), int(length)))
    possible, excludes = codes, rng.random() < 0.3
    at_random = rng.sample(codes, 4)
    for number in range(4 if excludes else rng.randint(1, 4)):
        guess = possible[0] if excludes else at_random[number]
        thought = "I try what is possible." if excludes else "I try one."
        reply = yield thought, ASK, f"[{' '.join(map(str, guess))}]"
        pegs = re.search(r"(\d+) black peg\(s\), (\d+) white", reply)
        if pegs is None:  # the code is cracked
            possible = [guess]
        else:
            black, white = map(int, pegs.groups())
            possible = [code for code in possible if pegs_of(code, guess) == (black, white)]
        if len(possible) == 1:
            break
    yield "Now I answer.", ANSWER, " ".join(map(str, rng.choice(possible)))


def pegs_of(code: tuple[int, ...], guess: tuple[int, ...]) -> tuple[int, int]:
    """The black and the white pegs of a guess, for codes without repeated digits."""
    black = sum(map(eq, code, guess))
    return black, len({*code} & {*guess}) - black


SCRIPTS = {"chain_sum": chain_sum_script, "GuessTheNumber-v0": number_script, "Mastermind-v0": code_script}


def main() -> None:
    """Make the games and the model, then run the warm start and the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    folder, (data, env) = Path(f"runs/{options.task}-seed{options.seed}"), TASKS[options.task]
    sizes = json.dumps(SIZES.get(options.task, {}))
    games = asyncio.run(scripted_games(options.task, options.seed))
    for thought, right in right_by_strategy(games).items():
        print(f"scripted games that begin with {thought!r}: {len(right):,}, right {mean(right):.3f}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "games.jsonl").open("w") as file:
        for question, turns in games:
            said = [{"text": turn.text, "reply": turn.reply} for turn in turns]
            file.write(json.dumps({"question": question.text, "turns": said}) + "\n")
    tokenizer = train_tokenizer((plain_text(*game) for game in games), vocabulary=1400)
    new_model(tokenizer, options.seed).save_pretrained(folder / "new")
    tokenizer.save_pretrained(folder / "new")
    seed = f"--seed {options.seed}"
    run(
        f"-m prompt_r1.baselines.sft --games {folder}/games.jsonl --agent {folder}/new --out {folder}/warm "
        f"{WARM_START} {seed}"
    )
    run(
        f"train.py --agent {folder}/warm/agent --data {data} --data-args {shlex.quote(sizes)} --env {env} "
        f"--out {folder}/run --steps {options.steps} {TRAINING} {seed}"
    )


async def scripted_games(task: str, seed: int) -> list[tuple[Question, list[Turn]]]:
    """Games of the script of a task, with questions that no training with a small seed has."""
    data, _ = TASKS[task]
    sizes = json.dumps({**SIZES.get(task, {}), "size": GAMES})
    script = SCRIPTS[task]
    environment = FreeSource(Calculator() if task == "chain_sum" else TextArenaEnvironment(sizes), seed=seed)
    questions = find_questions([data], "train", seed + SEEDS_APART, sizes)
    return [
        (
            question,
            await play(script(question, random.Random(f"script {question.id}")), environment, question),
        )
        for question in questions
    ]


def right_by_strategy(games: list[tuple[Question, list[Turn]]]) -> dict[str, list[bool]]:
    """Whether each scripted game ended right, by its first thought, which names the strategy."""
    right: dict[str, list[bool]] = {}
    for question, turns in games:
        right.setdefault(turns[0].action.think or "", []).append(turns[-1].action.answer in question.answers)
    return right


async def play(script: Script, environment: FreeSource, question: Question) -> list[Turn]:
    """The turns of a scripted game."""
    turns: list[Turn] = []
    history: list[Message] = []
    think, tag, content = next(script)
    while True:
        text = f"<think>{think}</think>\n<{tag}> {content} </{tag}>"
        if tag == ANSWER:
            return [*turns, Turn(text, parse(text), None)]
        history.append({"role": "user", "content": content})
        reply = (await environment.call(history, session=question.id)).text
        history.append({"role": "assistant", "content": reply})
        turns.append(Turn(text, parse(text), reply))
        think, tag, content = script.send(reply)


def run(command: str) -> None:
    """Print a command and run it."""
    print(f"python {command}", flush=True)
    subprocess.run([sys.executable, *shlex.split(command)], check=True)


if __name__ == "__main__":
    main()
