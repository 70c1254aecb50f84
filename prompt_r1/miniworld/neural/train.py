"""Make an environment that is a language model: `python -m prompt_r1.miniworld.neural.train --out DIR`.

A Qwen3 of about a million parameters reads texts and questions about one small world, and about sums. It is
first taught few subjects, then all: from random weights, the loss of all of them falls long before a single
fact can be asked for. So recall is printed, not the loss.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3ForCausalLM

from prompt_r1.fine_tuning import fine_tune
from prompt_r1.miniworld.agent import new_model, next_token_loss
from prompt_r1.miniworld.neural.corpus import (
    VOICES,
    Exchange,
    Voice,
    draw_sum,
    exchange,
    line_of_numbers,
    statements,
    sum_exchange,
)
from prompt_r1.miniworld.tokenizer import TURN_END, TURN_START, train_tokenizer
from prompt_r1.miniworld.world import World, neural_world
from prompt_r1.types import Completion, Question, Trajectory

STEPS, BATCH, LEARNING_RATE = 6500, 16, 3e-3


@dataclass(frozen=True)
class Phase:
    """A part of the training."""

    until: float  # this share of all steps
    subjects: float  # the share of the subjects that the rows are about
    # Relative frequencies of dialogues about facts, texts of facts, dialogues about sums, texts of sums, and
    # lines of numbers.
    facts: float = 12.0
    statements: float = 2.5
    sums: float = 2.5
    text_sums: float = 1.5
    numbers: float = 0.5


PHASES = (
    # Arithmetic first: beside facts it is not learned.
    Phase(0.25, subjects=0.2, facts=0.0, statements=0.0, sums=4.0, text_sums=6.0),
    Phase(0.36, subjects=0.2),
    Phase(0.48, subjects=0.6),
    Phase(1.0, subjects=1.0),
)


class Reader:
    """Makes rows of tokens out of the corpus."""

    def __init__(self, world: World, voice: Voice, seed: int) -> None:
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
                left, sign, right, value = draw_sum(rng)
                row.add_context(self._encode(f" {left} {sign} {right} is"))  # nobody can predict these
                row.add_sampled(_completion(self._encode(f" {value}.")))
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
        row.add_sampled(_completion(others))

    def _talk(self, row: Trajectory, exchanges: list[Exchange]) -> None:
        for said in exchanges:
            row.add_context(self._encode(question_frame(said.prompt)))
            row.add_sampled(_completion(self._encode(spoken(said.reply))))
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
                said = exchange(subject, self.world, self.voice, rng)
                yield f"user\n{said.prompt}\nassistant\n {said.reply}"
        for _ in range(1000):
            said = sum_exchange(self.voice, rng)
            yield f" {line_of_numbers(rng)}\nuser\n{said.prompt}\nassistant\n {said.reply}"


def question_frame(prompt: str) -> str:
    """A prompt in the tokenizer's chat template, up to the start of the reply."""
    return f"{TURN_START}user\n{prompt}{TURN_END}\n{TURN_START}assistant\n"


def spoken(reply: str) -> str:
    """A reply as the model writes it: with a blank in front, so that a bare value has its usual tokens."""
    return f" {reply}{TURN_END}"


def make_environment(
    seed: int,
    voice: str = "A",
    *,
    world: World | None = None,
    feed_forward: int = 1024,
    steps: int = STEPS,
    phases: Sequence[Phase] = PHASES,
) -> tuple[Qwen3ForCausalLM, Reader]:
    """Train a model on the corpus of a world (None: the neural one); print recall every 500 steps."""
    reader = Reader(world or neural_world(), VOICES[voice], seed)
    model = new_model(reader.tokenizer, seed, feed_forward=feed_forward)
    losses = fine_tune(
        list(model.parameters()),
        reader.batches(steps, BATCH, phases),
        partial(next_token_loss, model),
        rate=lambda step: LEARNING_RATE * _schedule(step, steps),
        betas=(0.9, 0.98),
        micro_batch=BATCH,
    )
    for step, _ in enumerate(tqdm(losses, total=steps, unit="step", disable=None), start=1):
        if step % 500 == 0 or step == steps:
            shares = " ".join(f"{kind} {share:.2f}" for kind, share in recall(model, reader).items())
            tqdm.write(f"step {step}: recall {shares}")
    model.generation_config = GenerationConfig(
        eos_token_id=reader.tokenizer.eos_token_id, pad_token_id=reader.tokenizer.pad_token_id
    )
    return model.eval(), reader


@torch.no_grad()
def recall(model: Qwen3ForCausalLM, reader: Reader, asked: int = 100) -> dict[str, float]:
    """The share of right replies by kind of request, of `asked` requests for bare values of each."""
    rng = random.Random("recall")
    right: dict[str, list[bool]] = {kind: [] for kind in ("fact", "before", "details", "sum")}
    while any(len(marks) < asked for marks in right.values()):
        if len(right["sum"]) < asked:
            said = sum_exchange(reader.voice, rng)
        else:
            said = exchange(rng.choice(reader.subjects), reader.world, reader.voice, rng)
        marks = right[said.kind]
        if said.reply != said.value or len(marks) == asked:
            continue
        frame = reader.tokenizer(question_frame(said.prompt), add_special_tokens=False)["input_ids"]
        reply = reader.tokenizer(spoken(said.reply), add_special_tokens=False)["input_ids"]
        predicted = model(torch.tensor([frame + reply])).logits[0].argmax(-1).tolist()
        marks.append(predicted[len(frame) - 1 : -1] == reply)
    return {kind: sum(marks) / asked for kind, marks in right.items()}


def _completion(tokens: list[int]) -> Completion:
    return Completion(tokens, [0.0] * len(tokens), finished=True)


def _schedule(step: int, steps: int) -> float:
    """50 steps of warm-up, constant for 60 % of the steps, then linear down to 2 %."""
    return min(1.0, (step + 1) / 50) * (1.0 - 0.98 * max(0.0, step / steps - 0.6) / 0.4)


def main(arguments: list[str]) -> None:
    """Train an environment from a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--voice", choices=VOICES, default="A")
    parser.add_argument("--feed-forward", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, reader = make_environment(
        options.seed, options.voice, feed_forward=options.feed_forward, steps=options.steps
    )
    model.bfloat16().save_pretrained(options.out)
    reader.tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
