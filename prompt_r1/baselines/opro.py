"""`opro` (Yang et al. 2023): a model improves scored instructions.

200 steps of 8 new instructions, each scored on all training questions. The optimiser sees the best 20 with a
score of at least 30 %, worst first, and three training questions. The instruction with the best training
score wins. Calls: 8 of the optimiser per step; of the environment, one per training question for the seed
prompt and for each new instruction.

`random-search` is the same search, but the optimiser sees random numbers in place of the scores: what the
feedback of any search must beat.
"""

import asyncio
import random
from collections.abc import Sequence

from prompt_r1.baselines.optimise import PromptSearch, SearchPart, draw_questions, mean_score, text_between
from prompt_r1.config.methods import MethodConfig
from prompt_r1.errors import UsageError
from prompt_r1.types import Question

MAX_LENGTH = 500  # characters of an instruction
SHOWN = 20  # the best instructions so far that the optimiser sees, …
THRESHOLD = 0.3  # … if they score at least this
EXEMPLARS = 3  # training questions that the optimiser sees
OPENING, CLOSING = "<INS>", "</INS>"
ROLE = "You write instructions for a language model that answers questions."
HEADER = """\
Find an instruction <INS> under which a language model answers questions like those below correctly. These \
were tried before, with their scores from 0 to 100; more is better.
"""
USE = "Problems that the model is given, each with the instruction's place <INS>, and their right answers:"
REQUEST = """\
Write one instruction that none of the above says and that earns a higher score. It should be short and fit \
all questions of the kind. Put it between <INS> and </INS>."""


async def opro(
    search: PromptSearch, part: SearchPart, *, config: MethodConfig, seed: int, informed: bool = True
) -> str:
    """The instruction with the best score on the training questions. Validation questions are not used.

    Unless `informed`, the optimiser sees random numbers in place of the scores.
    """
    train = draw_questions(part.train, config.opro_train, seed)
    if not train:
        raise UsageError("opro needs training questions: give --train-data")
    scores: dict[str, float] = {}
    # In an instruction for mathematical questions, a number could give away an answer.
    digits_allowed = not all(question.kind == "math" for question in train)

    async def try_out(step: int, instruction: str) -> None:
        scores[instruction] = mean_score(await search.try_prompt(instruction, train))
        search.record(step=step, prompt=instruction, train=scores[instruction])

    await try_out(0, config.seed_prompt)
    for step in range(1, config.opro_steps + 1):
        if not search.can_afford(config.opro_per_step):
            break
        rng = random.Random(f"opro {seed} {step}")
        examples = rng.sample(train, min(EXEMPLARS, len(train)))
        shown = scores if informed else {instruction: rng.random() for instruction in scores}
        request = meta_prompt(shown, examples)
        # The request is the same each time: the sample number makes each of them a call of its own.
        first = step * config.opro_per_step
        samples = range(first, first + config.opro_per_step)
        calls = [search.ask_optimizer(ROLE, request, sample=sample) for sample in samples]
        for reply in await asyncio.gather(*calls):
            instruction = read_instruction(reply)
            if instruction not in scores and is_usable(instruction, digits_allowed=digits_allowed):
                if not search.can_afford(len(train)):
                    break
                await try_out(step, instruction)
    return max(scores, key=lambda instruction: scores[instruction])


def meta_prompt(scores: dict[str, float], examples: Sequence[Question]) -> str:
    """The optimiser's request: instructions with scores, worst first, then problems, then the task.

    As in the authors' form for GPT models, scores are whole percent, and <INS> marks where the instruction
    stands in each problem: it is the system message, before the question.
    """
    good = [instruction for instruction, value in scores.items() if value >= THRESHOLD]
    good.sort(key=lambda instruction: scores[instruction])
    history = [f"instruction:\n{text}\nscore:\n{round(100 * scores[text])}" for text in good[-SHOWN:]]
    problems = [f"problem:\n<INS>\n{one.text}\nright answer:\n{one.answers[0]}" for one in examples]
    return "\n\n".join([HEADER, *history, USE, *problems, REQUEST])


def read_instruction(reply: str) -> str:
    """The instruction in the optimiser's reply; the whole reply if the tags are missing."""
    text = text_between(reply, OPENING, CLOSING)
    text = (reply if text is None else text).replace("**", "").strip()
    return text[:1].upper() + text[1:]


def is_usable(instruction: str, *, digits_allowed: bool) -> bool:
    """The filters of the authors' code: not empty, not too long, no left-over tag, no forbidden digits."""
    if not 0 < len(instruction) <= MAX_LENGTH or "INS" in instruction:
        return False
    return digits_allowed or not any(letter.isdigit() for letter in instruction)
