"""`opro` (Yang et al. 2023): a model reads the best instructions so far with their scores, and writes better
ones.

200 steps of 8 new instructions, each scored on all training questions; the optimiser sees the best 20 of at
least 30 %, worst first, and three training questions. The instruction with the best training score wins.
Calls: 8 of the optimiser a step, and of the environment one a training question for the seed and for each new
instruction.
"""

import asyncio
import random
from collections.abc import Sequence

from prompt_r1.baselines.optimise import Bench, between, chosen, mean_score
from prompt_r1.errors import UsageError
from prompt_r1.types import Question

LONGEST = 500  # characters of an instruction
OPENING, CLOSING = "<INS>", "</INS>"
ROLE = "You write instructions for a language model that answers questions."
HEADER = """\
Find an instruction <INS> under which a language model answers questions like those below correctly. These \
were tried before, with their scores from 0 to 100; more is better.
"""
USE = "The instruction is the model's system message. Some of its questions, with the right answers:"
REQUEST = """\
Write one instruction that none of the above says and that earns a higher score. It should be short and fit \
all questions of the kind. Put it between <INS> and </INS>."""


async def opro(
    bench: Bench,
    train: Sequence[Question],
    validation: Sequence[Question],
    *,
    seed_prompt: str,
    steps: int = 200,
    per_step: int = 8,
    shown: int = 20,
    threshold: float = 0.3,
    exemplars: int = 3,
    train_limit: int = 261,
    seed: int = 0,
) -> str:
    """The instruction with the best score on the training questions. `validation` is not looked at.

    `train_limit`: of the training questions so many are used (3.5 % of GSM8K's by default).
    """
    train = chosen(train, train_limit, seed)
    if not train:
        raise UsageError("opro needs training questions: give --train-data, and --opro-train above 0")
    scores: dict[str, float] = {}
    may_have_digits = not all(question.kind == "math" for question in train)  # else they leak an answer

    async def try_out(step: int, instruction: str) -> None:
        scores[instruction] = mean_score(await bench.trials(instruction, train))
        bench.record(step=step, prompt=instruction, train=scores[instruction])

    await try_out(0, seed_prompt)
    for step in range(1, steps + 1):
        if not bench.affords(per_step):
            break
        examples = random.Random(f"opro {seed} {step}").sample(train, min(exemplars, len(train)))
        request = meta_prompt(scores, examples, shown=shown, threshold=threshold)
        # The same request every time at temperature 1: the sample's number makes each a call of its own.
        calls = (bench.write(ROLE, request, sample=step * per_step + n) for n in range(per_step))
        for instruction in map(extract, await asyncio.gather(*calls)):
            if instruction not in scores and usable(instruction, may_have_digits=may_have_digits):
                if not bench.affords(len(train)):
                    break
                await try_out(step, instruction)
    return max(scores, key=lambda instruction: scores[instruction])


def meta_prompt(
    scores: dict[str, float], examples: Sequence[Question], *, shown: int, threshold: float
) -> str:
    """What the optimiser reads: instructions and scores, worst first, then questions, then the request."""
    good = sorted((pair for pair in scores.items() if pair[1] >= threshold), key=lambda pair: pair[1])
    history = [f"instruction: {text}\nscore: {round(100 * value)}" for text, value in good[-shown:]]
    problems = [f"question: {q.text}\nright answer: {q.answers[0]}" for q in examples]
    return "\n\n".join([HEADER, *history, USE, *problems, REQUEST])


def extract(reply: str) -> str:
    """The instruction in the optimiser's reply; the whole reply where the tags are missing."""
    text = between(reply, OPENING, CLOSING)
    text = (reply if text is None else text).replace("**", "").strip()
    return text[:1].upper() + text[1:]


def usable(instruction: str, *, may_have_digits: bool) -> bool:
    """Not empty, not too long, no left-over tag; the filters of the authors' code."""
    clean = may_have_digits or not any(letter.isdigit() for letter in instruction)
    return 0 < len(instruction) <= LONGEST and "INS" not in instruction and clean
