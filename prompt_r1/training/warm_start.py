"""Warm start: fine-tune an agent on recorded games, so that it has the format of the game before training.

    python -m prompt_r1.training.warm_start --agent DIR --games FILE
    python -m prompt_r1.training.warm_start --agent smollm2 --games mini

A model that lacks the format of the game earns no reward, so reinforcement learning cannot begin. Gold
answers would teach it not to ask; recorded games teach it to play.

In --games FILE each line has `question` (a text, or an object with `text`) and `turns`, a list of objects
with `text` (what the agent writes, with its tags) and `reply` (null after the answer). The files of
runs/*/trajectories have this form. `--games mini` are demonstrations in mini worlds that training does not
use. They show the format and several ways to ask, most of which fail.

`supervised.py` fine-tunes. The evaluation's methods `sft`, `bc` and `rft` use it, too.
"""

if __name__ == "__main__":  # Show --help and usage errors before the imports below, which take seconds.
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.programs.command_line import begin_imports, read_settings
    from prompt_r1.training.settings import read_warm_start_config

    settings = read_settings(read_warm_start_config)
    begin_imports()

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.rows import BadRow, fields_of, read_rows, text_field, text_of
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.demonstrations import demonstrations
from prompt_r1.pair.named_agent import preset_config
from prompt_r1.programs.command_line import command, run_program
from prompt_r1.protocol import Codec, parse
from prompt_r1.rollout import trajectory_of
from prompt_r1.settings.agent import is_mini_data, mini_part
from prompt_r1.settings.train import preset_of
from prompt_r1.training.settings import FineTuningConfig
from prompt_r1.training.supervised import fine_tune_agent
from prompt_r1.types import Question, Trajectory, Turn

# `--games mini` are the demonstrations of MINI_GAMES games in each of MINI_WORLDS worlds.
MINI_WORLDS = 8
MINI_GAMES = 6

Game = tuple[Question, list[Turn]]


def main(config: FineTuningConfig) -> None:
    """Warm-start an agent, and print the command that trains it."""
    folder = learn_games(config)
    preset = preset_of(config.agent, default=config.preset)
    then = command("train.py", "--config", preset, "--agent", folder)
    print(f"The agent is saved in {folder}. Train it:\n{then}")


def learn_games(config: FineTuningConfig) -> Path:
    """Warm-start an agent on its games, and return its folder."""
    out = Path(config.out)
    if is_mini_data(config.games):
        games = mini_games(config.games, config.seed)
    else:
        games = list(read_games(Path(config.games)))
    preset = preset_config(config.agent, default=config.preset)
    # train.py will start from the new agent, so the saved settings name the folder of the new agent.
    agent_config = replace(preset, agent=str(out / "agent"), seed=config.seed)
    return fine_tune_agent(
        lambda codec: encode(games, codec, max_reply_tokens=preset.max_reply_tokens),
        config,
        agent_config,
        out,
    )


def mini_games(source: str, seed: int) -> list[Game]:
    """The demonstrations of `mini`, or of `mini:KIND`."""
    kind = mini_part(source)
    kinds = [kind] if kind else None
    return list(demonstrations(seed, MINI_WORLDS, MINI_GAMES, kinds=kinds))


def encode(games: Sequence[Game], codec: Codec, *, max_reply_tokens: int) -> list[Trajectory]:
    """The games as an agent with this codec plays them."""
    examples = []
    for question, turns in games:
        # If the chat template writes the <think> with which a turn begins, the agent does not sample it.
        if codec.opened:
            texts = [turn.text.lstrip().removeprefix("<think>").lstrip() for turn in turns]
            turns = [replace(turn, text=text) for turn, text in zip(turns, texts, strict=True)]
        examples.append(trajectory_of(question, turns, codec, max_reply_tokens=max_reply_tokens))
    return examples


def read_games(path: Path) -> Iterator[Game]:
    """Read the games of a JSONL file. Raises UsageError with the number, from 1, of a row without a game."""
    for number, row in read_rows(path):
        try:
            fields = fields_of(row)
            question = _question_text(fields["question"])
            turns = _turns(fields["turns"])
        except (BadRow, KeyError, TypeError) as reason:
            raise UsageError(
                f"{path}, row {number}: a game has `question`, a text, and `turns`, a list of objects with "
                f"`text` and `reply`: {reason}"
            ) from None
        yield Question(str(number), path.stem, question, ()), turns


def _question_text(question: object) -> str:
    """The text of a question, which is a text or an object with `text`."""
    return text_field(question, "text") if isinstance(question, dict) else text_of(question, "question")


def _turns(played: object) -> list[Turn]:
    """The turns of a game. Raises BadRow, KeyError or TypeError."""
    if not isinstance(played, list) or not played:
        raise BadRow("`turns` is no list, or empty")
    turns: list[Turn] = []
    for row in played:
        if turns and turns[-1].reply is None:
            raise BadRow("a turn before the last has no reply")
        fields = fields_of(row)
        # A turn may be blank, and a reply, too.
        text = text_field(fields, "text", may_be_blank=True)
        reply = None if fields["reply"] is None else text_field(fields, "reply", may_be_blank=True)
        turns.append(Turn(text, parse(text), reply))
    return turns


if __name__ == "__main__":
    run_program(main, settings)
