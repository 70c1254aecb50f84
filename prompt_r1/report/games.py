"""The games that the report shows, read from the files of a run."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_r1.metrics.em_f1 import exact_match

if TYPE_CHECKING:  # `--help` reads this file, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 2_000_000  # of all games as markup, about
NOT_A_ROW = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
Row = Mapping[str, Any]  # a line of a file of the run
BOUNDS = (0.01, 0.1, 0.5, 2.0)  # nats, of the shades of a tint


@dataclass
class Tokens:
    """Consecutive tokens of one shade (a class of the style), and exact numbers of those that stand out."""

    text: str
    shade: str = ""
    numbers: str = ""


@dataclass
class ShownTurn:
    """A turn of the agent, with the reply of the environment."""

    written: list[Tokens]
    reply: str | None
    seconds: float


@dataclass
class ShownGame:
    """A game as a row of trajectories/*.jsonl, with its tinted turns."""

    row: Row
    right: bool | None  # None: a long text, which is neither right nor wrong
    turns: list[ShownTurn]


@dataclass
class ShownGroup:
    """The games of one question in one step."""

    kind: str  # training or validation
    step: int
    question: Row
    games: list[ShownGame] = field(default_factory=list)

    @property
    def right(self) -> int:
        return sum(game.right is True for game in self.games)

    @property
    def is_mixed(self) -> bool:
        """Whether it was trained on, and has right and wrong games."""
        trained = any(game.row["advantage"] for game in self.games)
        return trained and 0 < self.right < len(self.games)


def read_groups(folder: Path, *, best: int, last: int) -> list[ShownGroup]:
    """The training games of the first, middle, last and best step, and the validation games of the best.

    A group with right and wrong games comes first. Raises an error of NOT_A_ROW for a line that is no game.
    """
    from prompt_r1.agent.loading import load_tokenizer  # imports torch, which `--help` does not need

    training = _files_by_step(folder / "trajectories", "step", last=last)
    steps = sorted(training)
    chosen = {steps[0], steps[len(steps) // 2], steps[-1], best} & training.keys() if steps else set()
    validations = _files_by_step(folder / "trajectories", "validation", last=last)
    sources = [("training", step, training[step]) for step in sorted(chosen)]
    sources += [("validation", step, validations[step]) for step in {best} & validations.keys()]
    tokenizer = load_tokenizer(folder / "agent") if (folder / "agent/config.json").exists() else None
    groups: list[ShownGroup] = []
    for kind, step, paths in sources:
        characters, most = 0, MOST_CHARACTERS // len(sources)
        for path in paths:
            for group in _read_file(kind, step, path, tokenizer):
                characters += _characters(group)
                if characters > most and groups:
                    break
                groups.append(group)
    return sorted(groups, key=lambda group: group is not next((g for g in groups if g.is_mixed), None))


def _files_by_step(folder: Path, kind: str, *, last: int) -> dict[int, list[Path]]:
    """The trajectory files of each step up to `last`, in the order of the ranks; later ones were undone."""
    files: dict[int, dict[int, Path]] = {}
    for path in folder.glob(f"{kind}-*-rank*.jsonl"):
        match = re.fullmatch(kind + r"-(\d+)-rank(\d+)\.jsonl", path.name)
        if match and int(match[1]) <= last:
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    return {step: [path for _, path in sorted(by_rank.items())] for step, by_rank in files.items()}


def _read_file(
    kind: str, step: int, path: Path, tokenizer: "PreTrainedTokenizerBase | None"
) -> Iterator[ShownGroup]:
    """The groups of a file, in their order."""
    for _, rows in groupby(read_lines(path), key=lambda row: (row["group"], row["question"]["id"])):
        games = [
            ShownGame(row, is_right(row["answer"], row["question"]), _turns(row, tokenizer)) for row in rows
        ]
        yield ShownGroup(kind, step, games[0].row["question"], games)


def is_right(answer: str | None, question: Row) -> bool | None:
    """Whether an answer equals a gold answer; None for long texts, for which only F1 means something."""
    return None if question["kind"] == "text" else exact_match(answer or "", question["answers"]) == 1


def _turns(row: Row, tokenizer: "PreTrainedTokenizerBase | None") -> list[ShownTurn]:
    """The turns of a game, with tinted tokens where the run has its agent's tokenizer."""
    runs: list[list[Tokens]] = []
    start = written = 0
    for sampled, flags in groupby(row["sampled"], key=int):
        end = start + len(list(flags))
        if sampled and tokenizer is not None:
            logprobs = row["logprobs"][written : written + end - start]
            ratios = row.get("log_ratios", [])[written : written + end - start]
            runs.append(_tinted(row["tokens"][start:end], logprobs, ratios, tokenizer))
            written += end - start
        start = end
    if len(runs) != len(row["turns"]):
        runs = [[Tokens(turn["text"])] for turn in row["turns"]]
    pairs = zip(runs, row["turns"], strict=True)
    return [ShownTurn(tokens, turn["reply"], turn["latency"]) for tokens, turn in pairs]


def _tinted(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    log_ratios: Sequence[float],
    tokenizer: "PreTrainedTokenizerBase",
) -> list[Tokens]:
    """The tokens of a turn, those of the same shade together.

    A character of several tokens has no text of a single token: then the turn is not tinted.
    """
    texts = [str(tokenizer.decode([token])) for token in tokens]
    whole = str(tokenizer.decode(list(tokens)))
    if "".join(texts) != whole or len(logprobs) != len(tokens):
        return [Tokens(whole)]
    found: list[Tokens] = []
    for place, (text, logprob) in enumerate(zip(texts, logprobs, strict=True)):
        ratio = log_ratios[place] if log_ratios else 0.0
        surprise, change = _shade(-logprob), _shade(abs(ratio))
        shade = f"l{surprise}" + (f" {'up' if ratio > 0 else 'down'}{change}" if change else "")
        if surprise or change:
            found.append(Tokens(text, shade, f"log-probability {logprob:.2f}, log of the ratio {ratio:.3f}"))
        elif found and not found[-1].numbers:
            found[-1].text += text
        else:
            found.append(Tokens(text, shade))
    return found


def _shade(nats: float) -> int:
    return sum(nats >= bound for bound in BOUNDS)


def _characters(group: ShownGroup) -> int:
    """About the length of a group's markup."""
    turns = [turn for game in group.games for turn in game.turns]
    tokens = [one for turn in turns for one in turn.written]
    texts = [one.text for one in tokens] + [turn.reply or "" for turn in turns]
    return sum(map(len, texts)) + 90 * len(tokens) + 200 * len(turns) + 400 * len(group.games)


def read_lines(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file. Lines that were cut short by a kill, or are no JSON objects, are skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row
