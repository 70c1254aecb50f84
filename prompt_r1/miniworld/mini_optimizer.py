"""`mini-optimizer`: a script in place of a prompt-writing model.

It imitates what such models do. Asked for criticism, it looks at a question, the reply and the right answer,
and names a cause. Asked for a prompt, it takes the one in the request (of several, one of the best three) and
adds advice about a cause that it finds in the criticism, in the failed cases, or in the problems shown. Its
judgement is fallible: ERROR of its advice is drawn blindly from everything it knows, some of which harms, and
some of which no environment understands. It does not know what helps: a search must find that out.
"""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.types import Message

ERROR = 0.3  # share of the advice that is drawn blindly
DROP = 0.3  # probability that a sentence of the old prompt is left out
MOST_SENTENCES = 5
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Cause:
    """Why an answer may be wrong: how a question shows it, how criticism says it, and what may help."""

    question: str  # a pattern
    criticism: str
    advice: tuple[str, ...]


CAUSES = (
    Cause(
        r"is the \w+ of the \w+ of",
        "the question takes several steps, and it was answered in one go",
        (
            "Think step by step before you answer.",
            "Work out one relation after the other.",
            "Break the question down and check each fact.",
        ),
    ),
    Cause(
        r"released before (?!\d{4})",
        "the question compares two films, and nothing was looked up",
        (
            "Look up the release years of both films.",
            "Recall each year before you compare.",
            "Take one step at a time.",
        ),
    ),
    Cause(
        r"^(any idea|which person|how far back)",
        "the question is worded casually, and it was misread",
        ("Rephrase casual questions in plain words first.", "Read casual wording with care."),
    ),
    Cause(
        r"^problem:",
        "the problem takes two sums, and one of them went wrong",
        ("Do one sum at a time.", "Keep a running total.", "Think step by step before you answer."),
    ),
    Cause(
        r"summar|^what is .+ about",
        "the summary lacks what was expected of it",
        ("Name genre, hero and director in a summary.", "Give all details that matter."),
    ),
)
FORM = Cause(
    "",
    "the right answer is there, but in a sentence of its own",
    ("Answer with the name or number alone.", "Write nothing but the answer."),
)
ANYTHING = (
    *(sentence for cause in (*CAUSES, FORM) for sentence in cause.advice),
    "You are an expert on films and the people behind them.",
    "Be quick and do not think for long.",
    "Explain your answer in full sentences.",
    "Do not guess: say so when you are not sure.",
    "If in doubt, give the most likely answer.",
    "Be creative and vivid.",
    "Use logic.",
    "Stay calm.",
    "Double-check every name.",
)
# Opening and closing marks of the new prompt, where a request asks for one.
NEW_PROMPT_MARKS = (("<INS>", "</INS>"), ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"), ("```\n", "\n```"))
# Where the requests of `textgrad`, `gepa` and `opro` have the old prompt, or several from worst to best.
OLD_PROMPTS = (
    r"<LM_SYSTEM_PROMPT>(.*?)</LM_SYSTEM_PROMPT>",
    r"<VARIABLE>(.*?)</VARIABLE>",
    r"```\n(.*?)\n```",
    r"instruction:\n(.*?)\nscore:",
)
FAILED_CASE = (
    r"## Inputs\n([^#]*)\n## Generated Outputs\n([^#]*)\n"
    r"## Feedback\n[^#]* not right [^#]*answer is '([^'#]*)'"
)
CONVERSATION = r"<LM_INPUT>(.*?)</LM_INPUT>\s*<LM_OUTPUT>(.*?)</LM_OUTPUT>.*?right answer is '(.*?)'"
PROBLEM = r"problem:\n<INS>\n(.*?)\nright answer:"


class MiniOptimizer:
    """Writes a new prompt between the marks that a request names; criticises where it names none."""

    name = "mini-optimizer"

    def __init__(self, *, seed: int) -> None:
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._seed = seed

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        request = messages[-1]["content"]
        rng = random.Random(f"{self._seed} {sample} {request}".encode("utf-8", "replace"))
        text = _criticism(request)
        for opening, closing in NEW_PROMPT_MARKS:
            if opening in request:
                text = f"{opening}{_rewrite(request, rng)}{closing}"
                break
        read = sum(len(message["content"]) for message in messages)
        tokens_in, tokens_out = (math.ceil(length / CHARACTERS_PER_TOKEN) for length in (read, len(text)))
        return Outcome("ok", text=text, finish="stop", tokens_in=tokens_in, tokens_out=tokens_out)

    async def check(self) -> None:
        pass


def _criticism(request: str) -> str:
    """What is wrong with an answer or, if an earlier criticism is in the request, with the prompt."""
    for cause in (*CAUSES, FORM):
        if cause.criticism in request:
            return f"It says nothing that would help where {cause.criticism}."
    for question, reply, gold in re.findall(CONVERSATION, request, re.DOTALL):
        if reply != gold:
            return f"The answer is wrong: {_cause_of(question, reply, gold).criticism}."
    return "It is perfect."


def _cause_of(question: str, reply: str, gold: str) -> Cause:
    """The cause of a wrong answer."""
    if re.search(rf"\b{re.escape(gold)}\b", reply):
        return FORM
    return next((cause for cause in CAUSES if re.search(cause.question, question.lower())), FORM)


def _rewrite(request: str, rng: random.Random) -> str:
    """An old prompt with new advice."""
    found = [re.findall(pattern, request, re.DOTALL) for pattern in OLD_PROMPTS]
    old = next((prompts for prompts in found if prompts), [""])
    sentences = re.findall(r"[^.!?]+[.!?]?", rng.choice(old[-3:]))
    sentences = [sentence.strip() for sentence in sentences if sentence.strip()]
    if sentences and (len(sentences) >= MOST_SENTENCES or rng.random() < DROP):
        sentences.remove(rng.choice(sentences))
    causes = _causes_in(request)
    for _ in range(rng.choice((1, 1, 2))):
        blind = not causes or rng.random() < ERROR
        advice = rng.choice(ANYTHING if blind else rng.choice(causes).advice)
        if advice not in sentences:
            sentences.append(advice)
    return " ".join(sentences)


def _causes_in(request: str) -> list[Cause]:
    """The causes that a request for a new prompt gives a hint of, as often as it does."""
    causes = [
        cause
        for feedback in re.findall(r"<FEEDBACK>(.*?)</FEEDBACK>", request, re.DOTALL)
        for cause in (*CAUSES, FORM)
        if cause.criticism in feedback
    ]
    causes += [_cause_of(*case) for case in re.findall(FAILED_CASE, request, re.DOTALL)]
    problems = re.findall(PROBLEM, request, re.DOTALL)
    causes += [cause for text in problems for cause in CAUSES if re.search(cause.question, text.lower())]
    return causes
