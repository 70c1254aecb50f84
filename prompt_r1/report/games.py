"""The games that the report shows, read from the files of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_r1.foreign import json_object
from prompt_r1.metrics.em_f1 import exact_match

if TYPE_CHECKING:  # `--help` reads this file, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

MOST_GROUPS = 12  # shown of a step
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
class ShownGame:
    """A game as a row of trajectories/*.jsonl, with the tinted text of each turn."""

    row: Row
    written: list[list[Tokens]]

    @property
    def right(self) -> bool | None:
        """Whether the answer equals a gold answer; None for long texts, for which only F1 means something."""
        answer, question = self.row["answer"], self.row["question"]
        return None if question["kind"] == "text" else exact_match(answer or "", question["answers"]) == 1


@dataclass
class ShownGroup:
    """The games of one question in one step, such as "training step 3"."""

    source: str
    games: list[ShownGame]

    @property
    def right(self) -> int:
        return sum(game.right is True for game in self.games)

    @property
    def is_mixed(self) -> bool:
        """Whether it was trained on, and has right and wrong games."""
        trained = any(game.row["advantage"] for game in self.games)
        return trained and 0 < self.right < len(self.games)


def read_groups(folder: Path, *, best: int) -> list[ShownGroup]:
    """The training games of the first, middle, last and best step, and the validation games of the best.

    Groups of right and wrong games come first, of which something is learned. Lines that were cut short by a
    kill are skipped. Raises an error of NOT_A_ROW for a line that is no game.
    """
    from prompt_r1.agent.loading import load_tokenizer  # imports torch, which `--help` does not need

    training = _files_by_step(folder / "trajectories", "step")
    steps = sorted(training)
    chosen = {steps[0], steps[len(steps) // 2], steps[-1], best} & training.keys() if steps else set()
    sources = [(f"training step {step}", training[step]) for step in sorted(chosen)]
    if validation := _files_by_step(folder / "trajectories", "validation").get(best):
        sources.append((f"validation step {best}", validation))
    tokenizer = load_tokenizer(folder / "agent") if (folder / "agent/config.json").exists() else None
    groups: list[ShownGroup] = []
    for source, paths in sources:
        lines = (line for path in paths for line in path.read_text("utf-8", "replace").splitlines())
        rows = filter(None, map(json_object, lines))
        by_question = groupby(rows, key=lambda row: (row["group"], row["question"]["id"]))
        games = ([ShownGame(row, _turns(row, tokenizer)) for row in of_one] for _, of_one in by_question)
        groups += _mixed_first([ShownGroup(source, of_one) for of_one in games])[:MOST_GROUPS]
    return _mixed_first(groups)


def _mixed_first(groups: list[ShownGroup]) -> list[ShownGroup]:
    return sorted(groups, key=lambda group: not group.is_mixed)


def _files_by_step(folder: Path, kind: str) -> dict[int, list[Path]]:
    """The trajectory files of each step."""
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.glob(f"{kind}-*-rank*.jsonl")):
        files.setdefault(int(path.name.split("-")[1]), []).append(path)
    return files


def _turns(row: Row, tokenizer: "PreTrainedTokenizerBase | None") -> list[list[Tokens]]:
    """What the agent wrote in each turn, tinted where the run has its agent's tokenizer."""
    turns: list[list[Tokens]] = []
    start = written = 0
    for sampled, flags in groupby(row["sampled"], key=int):
        end = start + len(list(flags))
        if sampled and tokenizer is not None:
            logprobs = row["logprobs"][written : written + end - start]
            ratios = row.get("log_ratios", [])[written : written + end - start]
            turns.append(_tinted(row["tokens"][start:end], logprobs, ratios, tokenizer))
            written += end - start
        start = end
    return turns if len(turns) == len(row["turns"]) else [[Tokens(turn["text"])] for turn in row["turns"]]


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
        if surprise or change:
            shade = f"l{surprise}" + (f" {'up' if ratio > 0 else 'down'}{change}" if change else "")
            found.append(Tokens(text, shade, f"log-probability {logprob:.2f}, log of the ratio {ratio:.3f}"))
        elif found and not found[-1].shade:
            found[-1].text += text
        else:
            found.append(Tokens(text))
    return found


def _shade(nats: float) -> int:
    return sum(nats >= bound for bound in BOUNDS)
