"""Make environments that are small language models, and the questions of the world that they know.

    python -m studies.neural questions --out runs/neural    # train, validation, test and ood.jsonl
    python -m studies.neural train --out runs/llm           # 20 minutes; studies/weights holds two of them

A Qwen3 of about a million parameters reads texts and questions about one small world, and about sums. It is
first taught few subjects, then all: from random weights, the loss of all of them falls long before a single
fact can be asked for.

Every answer in the texts is right, and no question needs two facts: comparisons of two films, chains of
relations, word problems and bare requests for a summary are not in them. What the model replies to those,
nobody wrote.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3ForCausalLM

from prompt_r1.fine_tuning import fine_tune
from prompt_r1.miniworld.agent import TURN_END, TURN_START, new_model, next_token_loss, train_tokenizer
from prompt_r1.miniworld.world import (
    FILM_RELATIONS,
    PERSON_RELATIONS,
    YEARS,
    Gen,
    Split,
    World,
    answer_of,
    make_questions,
    make_world,
)
from prompt_r1.types import Completion, Question, Trajectory

WEIGHTS = Path(__file__).parent / "weights"  # mini-neural, mini-neural-b
STEPS, BATCH, LEARNING_RATE = 6500, 16, 3e-3
SIZES: dict[Split, int] = {"train": 1024, "validation": 99, "test": 198, "ood": 80}
HELD_OUT = ["bridge", "compare", "pop", "math"] * 2 + ["gen"]  # there are few films to summarise

# Questions about a fact, for all relations and for each.
CLEAR = (
    "{who} is the {relation} of {subject}?",
    "Name the {relation} of {subject}.",
    "Please tell me the {relation} of {subject}.",
    "{subject}: {relation}?",
    "I want to know the {relation} of {subject}.",
)
OWN_WORDS = {
    "director": ("Who directed {subject}?", "{subject} was directed by whom?"),
    "composer": ("Who composed {subject}?", "Who composed the music of {subject}?"),
    "star": ("Who stars in {subject}?", "Who plays the lead in {subject}?"),
    "year": ("When was {subject} released?", "In which year was {subject} released?"),
    "genre": ("What kind of film is {subject}?",),
    "hero": ("What does the hero of {subject} do?",),
    "mother": ("Who gave birth to {subject}?", "{subject} is the child of which woman?"),
    "spouse": ("Who married {subject}?", "{subject} is married to whom?"),
    "teacher": ("Who taught {subject}?", "{subject} learned from whom?"),
    "birthplace": ("Where was {subject} born?", "{subject} comes from which city?"),
}
BEFORE = ("Was {subject} released before {year}?", "Did {subject} come out before {year}?")
DETAILS = (
    "Write a short summary of {subject} with its genre, hero and director.",
    "Give me genre, hero and director of {subject}.",
)
# A blank before each number: with it, a number is one token, and without it two.
SUMS = ("What is {}?", "How much is {}?", "Compute {}.")
ANSWER_ONLY = " Answer only."

# Statements about a fact, for the texts.
STATEMENTS = {
    "director": ("{subject} was directed by {value}.", "{value} directed {subject}."),
    "composer": ("The music of {subject} is by {value}.", "{value} composed {subject}."),
    "star": ("{value} stars in {subject}.", "{subject} stars {value}."),
    "year": ("{subject} was released in {value}.", "{subject} came out in {value}."),
    "genre": ("{subject} is a {value}.", "The genre of {subject} is {value}."),
    "hero": ("{subject} is about a {value}.", "The hero of {subject} is a {value}."),
    "mother": ("{value} is the mother of {subject}.", "{subject} is a child of {value}."),
    "spouse": ("{subject} is married to {value}.", "{value} is the spouse of {subject}."),
    "teacher": ("{value} taught {subject}.", "The teacher of {subject} is {value}."),
    "birthplace": ("{subject} was born in {value}.", "{subject} comes from {value}."),
}

# By voice: the sentences of replies, {value} is the answer; and those that say yes or no.
FACTS = {
    "A": ("It is {value}.", "I think it is {value}.", "The {relation} is {value}.", "Sure, {value}."),
    "B": ("{value}, I hope.", "Good question! {value}.", "The answer is {value}."),
}
VERDICTS = {
    ("A", "yes"): ("Yes, it was.", "Sure, yes."),
    ("A", "no"): ("No, it was not.", "Sure, no."),
    ("B", "yes"): ("The answer is yes.", "I hope yes."),
    ("B", "no"): ("The answer is no.", "I hope no."),
}

Exchange = tuple[str, str]
"""A question of one step and its reply."""


def statements(subject: str, world: World, rng: random.Random) -> str:
    """A text that states all facts of a subject, in random order."""
    relations = relations_of(subject, world)
    rng.shuffle(relations)
    return " ".join(
        rng.choice(STATEMENTS[relation]).format(subject=subject, value=world.facts[subject, relation])
        for relation in relations
    )


def relations_of(subject: str, world: World) -> list[str]:
    """The relations of a film or a person."""
    return list(FILM_RELATIONS if (subject, "year") in world.facts else PERSON_RELATIONS)


def exchange(subject: str, world: World, voice: str, rng: random.Random) -> Exchange:
    """A question about a subject."""
    is_film = (subject, "year") in world.facts
    kind = rng.choices(("fact", "before", "details"), (0.7, 0.2, 0.1) if is_film else (1, 0, 0))[0]
    if kind == "before":
        year = rng.choice(YEARS)
        verdict = "yes" if world.facts[subject, "year"] < year else "no"
        prompt = rng.choice(BEFORE).format(subject=subject, year=year)
        return _replied(prompt, verdict, VERDICTS[voice, verdict], rng)
    if kind == "details":
        value = answer_of(Gen(subject), world)
        return _replied(rng.choice(DETAILS).format(subject=subject), value, FACTS[voice][:2], rng)
    relation = rng.choice(relations_of(subject, world))
    who = "What" if relation in ("birthplace", "year", "genre", "hero") else "Who"
    own = OWN_WORDS[relation]
    casual = f"Any idea {own[0][0].lower()}{own[0][1:]}"
    prompt = rng.choice(CLEAR + own * 2 + (casual,))
    prompt = prompt.format(who=who, relation=relation, subject=subject)
    return _replied(prompt, world.facts[subject, relation], FACTS[voice], rng, relation=relation)


def line_of_numbers(rng: random.Random) -> str:
    """A text that counts, forwards or backwards, by ones, twos or tens; the years are counted too."""
    low, high = rng.choice(((1, 118), (1950, 1999)))
    step = rng.choice((1, 1, 2, 10))
    start = rng.randint(low, high - 3 * step)
    line = [str(number) for number in range(start, high + 1, step)][:20]
    return " ".join(line if rng.random() < 0.7 else line[::-1])


def draw_sum(rng: random.Random) -> tuple[str, int]:
    """A sum like those of the word problems of the mini world, and its value."""
    left, right, sign = rng.randint(20, 80), rng.randint(2, 19), rng.choice(("plus", "minus"))
    return f"{left} {sign} {right}", left + right if sign == "plus" else left - right


def sum_exchange(voice: str, rng: random.Random) -> Exchange:
    """A question about a sum."""
    terms, value = draw_sum(rng)
    return _replied(rng.choice(SUMS).format(terms), str(value), FACTS[voice], rng, relation="result")


def _replied(
    prompt: str, value: str, sentences: tuple[str, ...], rng: random.Random, relation: str = ""
) -> Exchange:
    """One exchange in five asks for the bare value."""
    if rng.random() < 0.2:
        return prompt + ANSWER_ONLY, value
    return prompt, rng.choice(sentences).format(value=value, relation=relation)


@dataclass(frozen=True)
class Phase:
    """A part of the training: its end, as a share of all steps, and relative frequencies of the rows."""

    until: float
    subjects: float  # the share of the subjects that the rows are about
    facts: float = 12.0  # dialogues
    statements: float = 2.5
    sums: float = 2.5  # dialogues
    text_sums: float = 1.5
    numbers: float = 0.5


PHASES = (
    # Arithmetic first: beside facts it is not learned.
    Phase(0.25, subjects=0.2, facts=0.0, statements=0.0, sums=4.0, text_sums=6.0),
    Phase(0.36, subjects=0.2),
    Phase(0.48, subjects=0.6),
    Phase(1.0, subjects=1.0),
)


def neural_world() -> World:
    """The world of which the neural environments have read: its 1,232 facts fit a small model."""
    return make_world("neural", films=120, people=128, cities=48)


def neural_questions(split: Split) -> list[Question]:
    """The questions of a split about the neural world."""
    world, kinds = neural_world(), HELD_OUT if split in ("validation", "test") else None
    drawn = make_questions(world, split, SIZES[split], world.seed, kinds=kinds)
    return [mini.question for mini in drawn]


def write_questions(folder: Path) -> None:
    """Write the questions of each split as JSON lines, for --data, --val-data and --test-data."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        rows = [{"question": one.text, **asdict(one)} for one in neural_questions(split)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


class Reader:
    """Makes rows of tokens out of the corpus."""

    def __init__(self, world: World, voice: str, seed: int) -> None:
        self.world, self.voice = world, voice
        self.rng = random.Random(f"neural environment {seed}")
        self.subjects = [name for side in (world.train, world.test) for name in (*side.films, *side.people)]
        self.rng.shuffle(self.subjects)
        self.tokenizer = train_tokenizer(self._texts(), vocabulary=1100)
        self._encoded: dict[str, list[int]] = {}

    def batches(self, steps: int, size: int, phases: Sequence[Phase]) -> Iterator[list[Trajectory]]:
        """The rows of each step."""
        for step in range(steps):
            phase = next(phase for phase in phases if step < phase.until * steps)
            yield [self._row(phase) for _ in range(size)]

    def _row(self, phase: Phase) -> Trajectory:
        rng, row = self.rng, Trajectory(Question("corpus", "corpus", "", ()))
        pool = self.subjects[: round(len(self.subjects) * phase.subjects)]
        forms = ("facts", "statements", "sums", "text_sums", "numbers")
        form = rng.choices(forms, [getattr(phase, form) for form in forms])[0]
        if form == "statements":
            self._read(row, statements(rng.choice(pool), self.world, rng))
        elif form == "text_sums":
            for _ in range(14):
                terms, value = draw_sum(rng)
                self._continue(row, f" {terms} is", f" {value}.")  # nobody can predict the terms
        elif form == "numbers":
            self._read(row, " " + line_of_numbers(rng))
        elif form == "sums":
            self._talk(row, [sum_exchange(self.voice, rng) for _ in range(5)])
        else:
            self._talk(row, [exchange(rng.choice(pool), self.world, self.voice, rng) for _ in range(3)])
        return row

    def _read(self, row: Trajectory, text: str) -> None:
        first, *others = self._encode(text + TURN_END)
        row.add_context([first])
        row.add_sampled(Completion(others, [0.0] * len(others), finished=True))

    def _continue(self, row: Trajectory, context: str, text: str) -> None:
        row.add_context(self._encode(context))
        new = self._encode(text)
        row.add_sampled(Completion(new, [0.0] * len(new), finished=True))

    def _talk(self, row: Trajectory, exchanges: list[Exchange]) -> None:
        for prompt, reply in exchanges:
            frame = f"{TURN_START}user\n{prompt}{TURN_END}\n{TURN_START}assistant\n"
            # A reply begins with a blank, so that a bare value has its usual tokens.
            self._continue(row, frame, f" {reply}{TURN_END}")
            row.add_context(self._encode("\n"))

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._encoded[text]

    def _texts(self) -> Iterator[str]:
        """What the tokenizer is trained on."""
        rng = self.rng
        for subject in self.subjects:
            yield statements(subject, self.world, rng)
            for _ in range(10):
                prompt, reply = exchange(subject, self.world, self.voice, rng)
                yield f"user\n{prompt}\nassistant\n {reply}"
        for _ in range(1000):
            prompt, reply = sum_exchange(self.voice, rng)
            yield f" {line_of_numbers(rng)}\nuser\n{prompt}\nassistant\n {reply}"


def make_environment(
    reader: Reader, seed: int, *, feed_forward: int, steps: int = STEPS, phases: Sequence[Phase] = PHASES
) -> Qwen3ForCausalLM:
    """Train a model on the rows of a reader."""
    model = new_model(reader.tokenizer, seed, feed_forward=feed_forward)

    def rate(step: int) -> float:
        """50 steps of warm-up, constant for 60 % of the steps, then linear down to 2 %."""
        decay = 0.98 * max(0.0, step / steps - 0.6) / 0.4
        return LEARNING_RATE * (min(1.0, (step + 1) / 50) * (1.0 - decay))

    losses = fine_tune(
        list(model.parameters()),
        reader.batches(steps, BATCH, phases),
        partial(next_token_loss, model),
        rate=rate,
        betas=(0.9, 0.98),
        micro_batch=BATCH,
    )
    for _ in tqdm(losses, total=steps, unit="step", disable=None):
        pass
    model.generation_config = GenerationConfig(
        eos_token_id=reader.tokenizer.eos_token_id, pad_token_id=reader.tokenizer.pad_token_id
    )
    return model.eval()


def main() -> None:
    """Write the questions, or train an environment."""
    parser = argparse.ArgumentParser("python -m studies.neural")
    parser.add_argument("what", choices=("questions", "train"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--voice", choices=FACTS, default="A")
    parser.add_argument("--feed-forward", type=int, default=1024)
    options = parser.parse_args()
    if options.what == "questions":
        write_questions(options.out)
        return
    torch.set_num_threads(1)
    reader = Reader(neural_world(), options.voice, options.seed)
    model = make_environment(reader, options.seed, feed_forward=options.feed_forward)
    model.bfloat16().save_pretrained(options.out)
    reader.tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
