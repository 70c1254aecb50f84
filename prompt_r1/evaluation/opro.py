"""`opro` (Yang et al. 2023): a model improves scored instructions.

In each step the optimiser writes 8 new instructions, and each is scored on 261 training questions.
The optimiser sees the best 20 instructions with a score of at least 30 %, in rising order, and three training
questions. The instruction with the best training score wins.

Calls: a step makes 8 calls of the optimiser. The seed prompt and each new instruction take one call of the
environment per training question. With a limit of calls (--optimize-calls), the search ends when no more
instruction can be scored; without one (0), after 200 steps.
"""

import random
from collections.abc import Mapping, Sequence

from prompt_r1.environments.asking import last_between
from prompt_r1.evaluation.searches import Algorithm, Data, PromptSearch
from prompt_r1.rollout import run_together
from prompt_r1.types import Question

# The authors' numbers:
STEPS = 200
PER_STEP = 8  # new instructions in a step
SCORED_ON = 261  # training questions that score an instruction
MAX_LENGTH = 500  # the most characters of an instruction
SHOWN = 20  # the most instructions that the optimiser sees
THRESHOLD = 0.3  # the least score of an instruction that the optimiser sees
EXEMPLARS = 3  # training questions that the optimiser sees
ROLE = "You write instructions for a language model that answers questions."
HEADER = """\
Find an instruction <INS> under which a language model answers questions like those below correctly. These \
were tried before, with their scores from 0 to 100; more is better.
"""
USE = "Problems that the model is given, each with the instruction's place <INS>, and their right answers:"
REQUEST = """\
Write one instruction that none of the above says and that earns a higher score. It should be short and fit \
all questions of the kind. Put it between <INS> and </INS>."""


async def opro(search: PromptSearch, data: Data) -> str:
    """The instruction with the best score on the training questions. Validation questions are not used."""
    await search.begin(data.train, SCORED_ON)
    # In an instruction for mathematical questions, a number could reveal an answer.
    digits_allowed = not all(question.kind == "math" for question in search.questions)
    step_calls = PER_STEP + len(search.questions)
    step = 0
    while search.may_go_on(step_calls, authors_stop=step == STEPS):
        step += 1
        rng = random.Random(f"opro {search.seed} {step}")
        shown = rng.sample(search.questions, min(EXEMPLARS, len(search.questions)))
        request = meta_prompt(search.means, shown)
        # The eight requests of a step are equal, and the next step repeats them if nothing new was scored. So
        # the calls are told apart by their numbers.
        first = step * PER_STEP
        asked = [search.ask_optimizer(ROLE, request, sample=first + number) for number in range(PER_STEP)]
        for reply in await run_together(asked):
            if reply.finish == "length":  # The reply is cut.
                continue
            instruction = read_instruction(reply.text)
            usable = is_usable(instruction, digits_allowed=digits_allowed)
            if usable and instruction not in search.scores and search.may_call(len(search.questions)):
                await search.score(instruction)
    return search.best()


OPRO = Algorithm(
    opro,
    authors_calls=SCORED_ON + STEPS * PER_STEP * (1 + SCORED_ON),
    optimizer_share=1 / (1 + SCORED_ON),
    optimizer_fields={"temperature": 1.0, "max_tokens": 512},
)


def meta_prompt(scores: Mapping[str, float], examples: Sequence[Question]) -> str:
    """The request to the optimiser: instructions with scores (the worst first), then problems, then the task.

    As in the authors' form for GPT models, scores are whole percent, and <INS> marks the place of the
    instruction in each problem. It is before the question, because the instruction becomes the system
    message.
    """
    good = [instruction for instruction, score in scores.items() if score >= THRESHOLD]
    good.sort(key=lambda instruction: scores[instruction])
    history = [f"instruction:\n{text}\nscore:\n{round(100 * scores[text])}" for text in good[-SHOWN:]]
    problems = []
    for question in examples:
        problems.append(f"problem:\n<INS>\n{question.text}\nright answer:\n{question.answers[0]}")
    return "\n\n".join([HEADER, *history, USE, *problems, REQUEST])


def read_instruction(reply: str) -> str:
    """The instruction in the optimiser's reply, or the whole reply if the tags are missing."""
    inside = last_between(reply, "<INS>", "</INS>")
    text = (inside or reply).replace("**", "").strip()
    return text[:1].upper() + text[1:]


def is_usable(instruction: str, *, digits_allowed: bool) -> bool:
    """Whether an instruction is not empty and not too long, and has no left-over tag and no forbidden digit.

    These are the filters of the authors' code.
    """
    if not 0 < len(instruction) <= MAX_LENGTH or "INS" in instruction:
        return False
    return digits_allowed or not any(letter.isdigit() for letter in instruction)
