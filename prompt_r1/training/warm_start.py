"""Warm start: fine-tune an agent on recorded games, so that it has the format of the game before training.

    python -m prompt_r1.training.warm_start --agent DIR --games FILE
    python -m prompt_r1.training.warm_start --agent smollm2 --games mini

A model that lacks the format of the game earns no reward, so reinforcement learning cannot begin. Gold
answers would teach it not to ask; recorded games teach it to play. In --games FILE each line has `question`
(a text, or an object with `text`) and `turns`, a list of objects with `text` (what the agent writes, with its
tags) and `reply` (null after the answer). The files of runs/*/trajectories have this form. `--games mini` are
demonstrations in mini worlds that training does not use: the format, and several ways to ask, most of which
fail.

Only the agent's own tokens enter the loss. The settings are the paper's (Table 7), and LLaMA-Factory's where
the paper gives none. The evaluation's methods `sft`, `bc` and `rft` fine-tune in the same way.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.programs.command_line import read_settings
    from prompt_r1.training.warm_start_settings import read_warm_start_config

    settings = read_settings(read_warm_start_config)

import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from prompt_r1.data.rows import BadRow, fields_of, read_rows, text_field
from prompt_r1.engine.model_check import check_model
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.agent import demonstrations
from prompt_r1.miniworld.demonstrations import record
from prompt_r1.model.distributed import Ranks, pick_device
from prompt_r1.model.fine_tuning import fine_tune
from prompt_r1.model.lora import add_lora
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import load_agent
from prompt_r1.pair.names import find_agent
from prompt_r1.pair.trained import agent_preset
from prompt_r1.programs.command_line import command, run_program
from prompt_r1.programs.files import TEMPORARY, make_folder
from prompt_r1.programs.progress import progress_style
from prompt_r1.protocol import Codec, parse
from prompt_r1.settings.agent import AgentConfig, is_mini_data
from prompt_r1.settings.train import preset_of
from prompt_r1.training.export import export_agent
from prompt_r1.training.run import load_learner
from prompt_r1.training.warm_start_settings import SftConfig
from prompt_r1.types import Question, Trajectory, Turn

logger = logging.getLogger(__name__)

BATCH_SIZE = 32  # examples of an optimiser step: the paper's 4 × 8
LEAST_STEPS = 30  # Fewer steps teach little, so few examples get smaller batches.
# `--games mini` are demonstrations of this many games in each of this many worlds.
MINI_WORLDS = 8
MINI_GAMES = 6


def main(config: SftConfig) -> None:
    """Warm-start an agent, and print the command that trains it."""
    if config.threads:
        torch.set_num_threads(config.threads)
    out = Path(config.out or f"runs/sft-seed{config.seed}")
    folder = learn_games(config.games, config, out)
    preset = preset_of(config.agent, config.preset)
    then = command("train.py", "--config", preset, "--agent", folder)
    print(f"The agent is saved in {folder}. Train it:\n{then}")


def learn_games(source: str, config: SftConfig, out: Path) -> Path:
    """Warm-start an agent on the games of a file or of `mini`; the folder of the result."""
    games = mini_games(source, config.seed) if is_mini_data(source) else list(read_games(Path(source)))

    def examples(codec: Codec) -> list[Trajectory]:
        return [record(question, sampled_turns(turns, codec), codec) for question, turns in games]

    preset = agent_preset(preset_of(config.agent, config.preset))
    # Reinforcement learning has not begun: the agent is its own start.
    trained_as = replace(preset, agent=str(out / "agent"), seed=config.seed)
    return fine_tune_agent(examples, config, trained_as, out)


def mini_games(source: str, seed: int) -> list[tuple[Question, list[Turn]]]:
    """The demonstrations of `mini`, or of `mini:KIND`."""
    _, _, kind = source.partition(":")
    kinds = [kind] if kind else None
    return list(demonstrations(seed, MINI_WORLDS, MINI_GAMES, kinds=kinds))


def sampled_turns(turns: list[Turn], codec: Codec) -> list[Turn]:
    """The turns without the <think> that the chat template opens for the agent."""
    if not codec.opened:
        return turns
    sampled = []
    for turn in turns:
        text = turn.text.lstrip().removeprefix("<think>").lstrip()
        sampled.append(replace(turn, text=text))
    return sampled


def read_games(path: Path) -> Iterator[tuple[Question, list[Turn]]]:
    """The games of a JSONL file. Raises UsageError with the number of a row, from 1, that holds none."""
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
    return text_field(question if isinstance(question, dict) else {"text": question}, "text")


def _turns(played: object) -> list[Turn]:
    """The turns of a game. Raises BadRow, KeyError or TypeError."""
    if not isinstance(played, list) or not played:
        raise BadRow("`turns` is no list, or empty")
    turns: list[Turn] = []
    for row in played:
        if turns and turns[-1].reply is None:
            raise BadRow("a turn before the last has no reply")
        fields = fields_of(row)
        text = text_field(fields, "text")
        reply = None if fields["reply"] is None else text_field(fields, "reply")
        turns.append(Turn(text, parse(text), reply))
    return turns


def fine_tune_agent(
    examples: Callable[[Codec], Sequence[Trajectory]], config: SftConfig, trained_as: AgentConfig, out: Path
) -> Path:
    """Fine-tune an agent on games, for the game `trained_as`; the folder of the result.

    Writes metrics.jsonl beside it. `examples` gives the games as the agent's codec encodes them.
    """
    make_folder(out, _is_fine_tuning, "a fine-tuning")
    device = pick_device(config.device)
    start = find_agent(config.agent, trained_as.seed)
    agent = load_agent(start, trained_as, device)
    policy = agent.policy
    alone = Ranks(0, 1, policy.device)
    if config.rank:
        trainable = add_lora(policy.model, rank=config.rank, alpha=2 * config.rank, seed=config.seed)
        check_model(policy)
    else:
        policy = load_learner(start, policy, alone, offload=False)
        trainable = policy.trained_parameters()
    if policy.device.type == "cuda":
        policy.checkpoint_activations()
    with (out / "metrics.jsonl").open("w", buffering=1) as file:
        for line in train_weights(policy, trainable, examples(agent.codec), config):
            file.write(json.dumps(line) + "\n")
    if not math.isfinite(alone.weight_norm(policy)):
        raise UsageError("the weights are not finite and are not saved: give a smaller --lr")
    export_agent(policy, str(start), trained_as, out / "agent", metrics=line, ranks=alone)
    return out / "agent"


def _is_fine_tuning(folder: Path) -> bool:
    """Whether all files in a folder are of a fine-tuning, which may have been killed."""
    written = {"metrics.jsonl", "agent", ".agent.old", TEMPORARY}
    return {path.name for path in folder.iterdir()} <= written


def train_weights(
    policy: Policy, trainable: list[nn.Parameter], examples: Sequence[Trajectory], config: SftConfig
) -> Iterator[dict[str, float]]:
    """Take AdamW steps; yields the metrics of each. Examples of more than --cutoff tokens are left out."""
    most = config.cutoff
    used = [example for example in examples if len(example.tokens) <= most]
    if not used:
        raise UsageError(f"nothing is left to train on: all examples have more than --cutoff {most} tokens")
    if len(used) < len(examples):
        logger.warning("%d examples of more than %d tokens are left out", len(examples) - len(used), most)
    per_step = config.batch_size or batch_size_for(len(used) * config.epochs)
    rng = random.Random(f"sft {config.seed}")
    batches = []
    for _ in range(config.epochs):
        epoch = rng.sample(used, len(used))
        for first in range(0, len(epoch), per_step):
            batches.append(epoch[first : first + per_step])
    if len(batches) < LEAST_STEPS:
        shown = f"{len(used)} examples in {config.epochs} epochs are {len(batches)} steps"
        logger.warning("%s, which teach little: give more examples, or more --epochs", shown)

    return fine_tune(
        trainable,
        tqdm(batches, desc="fine-tuning", unit="step", leave=False, **progress_style()),
        partial(negative_log_likelihood, policy),
        rate=lambda step: config.lr * schedule(step, len(batches)),
        betas=(0.9, 0.999),
        micro_batch=config.micro_batch,
    )


def batch_size_for(examples: int) -> int:
    """The examples of a step: the paper's number, or fewer, so that there are enough steps."""
    return max(1, min(BATCH_SIZE, examples // LEAST_STEPS))


def negative_log_likelihood(policy: Policy, examples: Sequence[Trajectory]) -> Tensor:
    """The mean over the agent's tokens, in nats."""
    groups = [[example] for example in examples]
    scores = policy(pack(groups, policy.device))
    return -scores.logprobs.mean()


def schedule(step: int, steps: int) -> float:
    """The share of the peak learning rate: it rises linearly in a tenth of the steps, then decays to 0.

    The decay is a cosine. No step that rises is at 0, since a step at 0 teaches nothing.
    """
    rising = math.ceil(0.1 * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    decayed = (step - rising) / max(steps - rising, 1)
    return 0.5 * (1 + math.cos(math.pi * decayed))


if __name__ == "__main__":
    run_program(main, settings)
