"""GEPA and TextGrad against their authors' packages, under scripted models.

The packages live in environments of their own; without them these tests are skipped:

    python3 -m venv .originals/gepa && .originals/gepa/bin/pip install gepa==0.1.4
    python3 -m venv .originals/textgrad && .originals/textgrad/bin/pip install textgrad==0.1.8

GEPA must make the same calls in the same order: parents, minibatches, acceptance,
validation and end. TextGrad's model must be asked as often and be shown the same, in whatever words.
"""

import asyncio
import json
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from prompt_r1.baselines.ask_once import task_score
from prompt_r1.baselines.gepa import gepa, read_fenced_prompt
from prompt_r1.baselines.method import Ledger
from prompt_r1.baselines.optimise import SearchPart, draw_questions
from prompt_r1.baselines.textgrad import rewrite
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.spending import Spending
from prompt_r1.types import Question
from tests.support import scripted
from tests.support.paths import ROOT

HERE = Path(__file__).parent


def original(name: str, searches: Sequence[dict], folder: Path) -> list[dict]:
    """The results of an author's package on scripted searches. Skips the test where it is not installed."""
    python = ROOT / ".originals" / name / "bin/python"
    if not python.exists():
        pytest.skip(f"{name} is not installed in .originals/{name}")
    done = subprocess.run(
        [python, HERE / f"original_{name}.py"],
        input=json.dumps(searches),
        capture_output=True,
        text=True,
        cwd=folder,  # textgrad writes logs
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


# --- GEPA ---

PROMPTS = 60
GOLD = tuple("abcdefghij")  # an answer with k of these words has an F1 between 0 and 1


class ScriptedSearch:
    """In place of a PromptSearch: scores are read from a table, and every call is recorded."""

    def __init__(self, given: dict) -> None:
        self.given = given
        self.ledger = Ledger()
        self.max_calls = 0
        self.calls: list[list] = []
        self.requests: list[str] = []

    def can_afford(self, calls: int) -> bool:
        return True

    def record(self, **event: object) -> None:
        pass

    async def try_prompt(self, prompt: str, questions: Sequence[Question]) -> list[Prediction]:
        self.ledger.task += Spending(len(questions))
        self.calls.append([prompt, [question.id for question in questions]])
        return [answered(prompt, question, self.given["words"]) for question in questions]

    async def ask_optimizer(self, system: str, request: str, *, sample: int = 0) -> str:
        self.requests.append(request)
        return scripted.rewrite(request, PROMPTS)


def answered(prompt: str, question: Question, words: dict[str, dict[str, int]]) -> Prediction:
    return Prediction(question, " ".join(GOLD[: words[prompt][question.id]]), f"{prompt} says {question.id}")


def question_of(name: str) -> Question:
    return Question(name, "a", f"question {name}", (" ".join(GOLD),), "text")


def gepa_search(seed: int) -> dict:
    """A random search: sizes, batch, budget, and how many words of the gold answer each prompt leads to."""
    rng = random.Random(seed)
    train = [f"q{n}" for n in range(rng.randint(3, 17))]
    validation = [f"q{n}" for n in range(50, 50 + rng.randint(1, 12))]
    coarse = rng.random() < 0.5  # scores of 0 and 1 only, with many ties
    words = {
        f"p{n}": {name: rng.choice((0, 10)) if coarse else rng.randint(0, 10) for name in train + validation}
        for n in range(PROMPTS)
    }
    scores = {prompt: {name: gepa_score(prompt, name, words) for name in of} for prompt, of in words.items()}
    return {
        "seed": seed,
        "train": train,
        # In the order in which ours draws them.
        "validation": [one.id for one in draw_questions(list(map(question_of, validation)), 99, seed)],
        "batch": rng.randint(1, min(5, len(train))),
        "budget": rng.randint(20, 250),
        "seed_prompt": f"p{rng.randrange(PROMPTS)}",
        "words": words,
        "scores": scores,
    }


def gepa_score(prompt: str, name: str, words: dict[str, dict[str, int]]) -> float:
    return task_score(answered(prompt, question_of(name), words))


def sections(request: str, heading: str) -> list[str]:
    """The texts below the headings of this name."""
    return [text.strip() for text in re.findall(rf"## {heading}\n(.*?)\n(?=\n*#|\n|```)", request, re.DOTALL)]


@pytest.mark.slow
def test_gepa_makes_the_calls_of_the_original_in_the_same_order(tmp_path):
    searches = [gepa_search(seed) for seed in range(60)]
    originals = original("gepa", searches, tmp_path)
    accepted = skipped = 0
    for given, theirs in zip(searches, originals, strict=True):
        ours = ScriptedSearch(given)
        train, validation = given["train"], sorted(given["validation"])
        part = SearchPart("a", list(map(question_of, train)), list(map(question_of, validation)))
        found = gepa(
            ours,
            part,
            examples=len(validation),
            seed=given["seed"],
            batch_size=given["batch"],
            metric_calls=given["budget"],
            seed_prompt=given["seed_prompt"],
        )
        best = asyncio.run(found)
        assert ours.calls == theirs["calls"], given["seed"]
        assert best == theirs["best"] and ours.ledger.task.calls == theirs["evaluations"]
        assert len(ours.requests) == len(theirs["requests"])
        for ours_asked, theirs_asked in zip(ours.requests, theirs["requests"], strict=True):
            for heading in ("Inputs", "Generated Outputs"):
                assert sections(ours_asked, heading) == sections(theirs_asked, heading) != []
        accepted += len(theirs["candidates"]) - 1
        skipped += len(theirs["calls"]) - 1 - 2 * len(theirs["requests"]) - (len(theirs["candidates"]) - 1)
    assert accepted > 100 and skipped > 20, "the searches met all cases"


@pytest.mark.parametrize(
    ("reply", "prompt"),
    [
        ("Sure:\n```\na b\n```\nDone", "a b"),
        ("```markdown\na b\n```", "a b"),
        ("```a b```", "a b"),
        ("```one-word\nrest of it\n```", "rest of it"),
        ("x ```\na ```y``` b\n``` z", "a ```y``` b"),
        ("```text\nopen a b", "open a b"),
        ("closed a b\n```", "closed a b"),
        ("in the ``` middle", "in the ``` middle"),
        ("none", "none"),
        ("", ""),
        ("``````", ""),
    ],
)
def test_gepa_reads_replies_as_the_original(reply, prompt):
    """The expected prompts are those of `InstructionProposalSignature.output_extractor` of gepa 0.1.4."""
    assert read_fenced_prompt(reply) == prompt


# --- TextGrad ---


def textgrad_search(seed: int) -> dict:
    rng = random.Random(seed)
    length = rng.choice((1, 5, 19, 20, 21, 60, 200))
    separators = (" ", " ", " ", "\n", "  ")
    seed_prompt = "".join(f"s{n}{rng.choice(separators)}" for n in range(length)).strip()
    names = [f"q{n}" for n in rng.sample(range(100), 12)]
    size = rng.randint(1, 3)
    return {"seed_prompt": seed_prompt, "batches": [names[k : k + size] for k in range(0, 4 * size, size)]}


class CriticisingSearch:
    """In place of a PromptSearch, for TextGrad."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.tasks: list[list[str]] = []

    async def try_prompt(self, prompt: str, questions: Sequence[Question]) -> list[Prediction]:
        self.tasks += [[prompt, question.text] for question in questions]
        return [Prediction(one, "r" + one.id[1:], "r" + one.id[1:]) for one in questions]

    async def ask_optimizer(self, system: str, request: str, *, sample: int = 0) -> str:
        self.requests.append([system, request])
        return scripted.criticise(system, request)


async def our_updates(given: dict, search: CriticisingSearch) -> list[str]:
    prompts, prompt = [], given["seed_prompt"]
    for batch in given["batches"]:
        questions = [Question(name, "a", f"question {name}", (f"gold {name}",)) for name in batch]
        prompt = await rewrite(search, prompt, questions)
        prompts.append(prompt)
    return prompts


def shown(request: str) -> Counter[str]:
    """What a request shows: the contents of the tags, as often as they appear."""
    contents: Counter[str] = Counter()
    for tag in ("LM_SYSTEM_PROMPT", "LM_INPUT", "LM_OUTPUT", "FEEDBACK", "VARIABLE"):
        # A closing tag is needed: the originals' instructions also name bare tags.
        for content in re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", request, re.DOTALL):
            contents[f"{tag}: {content.strip()}"] += 1
    return contents


def requests_by_kind(requests: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """The requests for criticism of replies and of prompts, and for new prompts."""
    kinds: dict[str, list[str]] = {"reply": [], "prompt": [], "rewrite": []}
    for _, request in requests:
        if "<IMPROVED_VARIABLE>" in request:
            kinds["rewrite"].append(request)
        else:
            kinds["prompt" if "<LM_SYSTEM_PROMPT>" in request else "reply"].append(request)
    return kinds


@pytest.mark.slow
def test_textgrad_asks_as_often_as_the_original_and_shows_the_same(tmp_path):
    searches = [textgrad_search(seed) for seed in range(30)]
    for given, theirs in zip(searches, original("textgrad", searches, tmp_path), strict=True):
        search = CriticisingSearch()
        assert asyncio.run(our_updates(given, search)) == theirs["prompts"]
        assert sorted(search.tasks) == sorted(theirs["tasks"])
        ours, original_requests = requests_by_kind(search.requests), requests_by_kind(theirs["requests"])
        assert {kind: len(of) for kind, of in ours.items()} == {
            kind: len(of) for kind, of in original_requests.items()
        }
        for our_request, their_request in zip(ours["rewrite"], original_requests["rewrite"], strict=True):
            assert shown(our_request) == shown(their_request)
        # Criticism of the prompt: the conversation, and the criticism of its reply.
        tags = ("LM_SYSTEM_PROMPT", "LM_INPUT", "LM_OUTPUT")
        our_texts, their_texts = (
            sorted([line for line in shown(one) if line.startswith(tags)] for one in of["prompt"])
            for of in (ours, original_requests)
        )
        assert our_texts == their_texts
        assert all("reply seen r" in one for of in (ours, original_requests) for one in of["prompt"])
        for of in (ours, original_requests):  # criticism of the reply: the reply and the right answer
            assert all("gold q" in one and re.search(r"\br\d+", one) for one in of["reply"])
