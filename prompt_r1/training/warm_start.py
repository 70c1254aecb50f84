"""Supervised fine-tuning: on gold answers for the method `sft`, or on recorded games as a warm start.

    python -m prompt_r1.training.warm_start --agent DIR --games FILE
    python -m prompt_r1.training.warm_start --agent smollm2 --games mini

The settings are those of the paper's Table 7, and LLaMA-Factory's where the paper gives none. For `sft` the
prompt is the question with the instruction to answer in <answer> tags; the target is the first gold answer in
these tags, without thinking. Only the target enters the loss.

A model that lacks the format of the game cannot begin, and gold answers teach it not to ask. --games FILE
teaches it whole games: each line has `question` (a text, or an object with `text`) and `turns`, a list of
objects with `text` (what the agent writes, with its tags) and `reply` (null after the answer). The files of
runs/*/trajectories have this form. `--games mini` are demonstrations in mini worlds other than that of
training: the format, and several ways to ask, most of which fail.
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

BATCH_SIZE = 32  # examples of an optimiser step, the paper's 4 × 8
MINI_GAMES = 8, 6  # worlds whose demonstrations are `--games mini`, and games in each
LEAST_STEPS = 30  # fewer teach little: few examples get smaller batches


def main(config: SftConfig) -> None:
    """Warm-start an agent, and print the command that trains it."""
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = learn_games(config.games, config, Path(config.out or f"runs/sft-seed{config.seed}"))
    then = command("train.py", "--config", preset_of(config.agent, config.preset), "--agent", folder)
    print(f"The agent is saved in {folder}. Train it:\n{then}")


def learn_games(source: str, config: SftConfig, out: Path) -> Path:
    """Warm-start an agent on the games of a file or of `mini`; the folder of the result."""
    if is_mini_data(source):
        kind = source.partition(":")[2]
        games = list(demonstrations(config.seed, *MINI_GAMES, kinds=[kind] if kind else None))
    else:
        games = list(read_games(Path(source)))

    def examples(codec: Codec) -> list[Trajectory]:
        return [record(question, _sampled(turns, codec), codec) for question, turns in games]

    preset = agent_preset(preset_of(config.agent, config.preset))
    # Reinforcement learning has not begun: the agent is its own start.
    return fine_tune_agent(examples, config, replace(preset, agent=str(out / "agent"), seed=config.seed), out)


def _sampled(turns: list[Turn], codec: Codec) -> list[Turn]:
    """The turns without the <think> that the chat template opens for the agent."""
    if not codec.opened:
        return turns
    return [replace(turn, text=turn.text.lstrip().removeprefix("<think>").lstrip()) for turn in turns]


def read_games(path: Path) -> Iterator[tuple[Question, list[Turn]]]:
    """The games of a JSONL file. Raises UsageError with the row, from 1, that holds none."""
    for number, row in read_rows(path):
        try:
            fields, turns = fields_of(row), list[Turn]()
            asked, played = fields["question"], fields["turns"]
            if not isinstance(played, list) or not played:
                raise BadRow("`turns` is no list, or empty")
            for turn in map(fields_of, played):
                text, reply = text_field(turn, "text"), turn["reply"]
                if turns and turns[-1].reply is None:
                    raise BadRow("a turn before the last has no reply")
                turns.append(Turn(text, parse(text), None if reply is None else text_field(turn, "reply")))
            question = text_field(asked if isinstance(asked, dict) else {"text": asked}, "text")
        except (BadRow, KeyError, TypeError) as reason:
            raise UsageError(
                f"{path}, row {number}: a game has `question`, a text, and `turns`, a list of objects with "
                f"`text` and `reply`: {reason}"
            ) from None
        yield Question(str(number), path.stem, question, ()), turns


def fine_tune_agent(
    examples: Callable[[Codec], Sequence[Trajectory]], config: SftConfig, trained_as: AgentConfig, out: Path
) -> Path:
    """Fine-tune an agent on games, for the game `trained_as`; the folder of the result.

    Writes metrics.jsonl beside it.
    """
    ours = {"metrics.jsonl", "agent", ".agent.old", TEMPORARY}
    make_folder(out, lambda out: {path.name for path in out.iterdir()} <= ours, "a fine-tuning")
    device = pick_device(config.device)
    start = find_agent(config.agent, trained_as.seed)
    agent = load_agent(start, trained_as, device)
    alone, policy = Ranks(0, 1, agent.policy.device), agent.policy
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


def train_weights(
    policy: Policy, trainable: list[nn.Parameter], examples: Sequence[Trajectory], config: SftConfig
) -> Iterator[dict[str, float]]:
    """AdamW steps; yields the metrics of each."""
    count, most = len(examples), config.cutoff
    examples = [example for example in examples if len(example.tokens) <= most]
    if not examples:
        raise UsageError(f"nothing is left to train on: all examples have more than --cutoff {most} tokens")
    if len(examples) < count:
        logger.warning("%d examples of more than %d tokens are left out", count - len(examples), most)
    per_step = config.batch_size or batch_size_for(len(examples) * config.epochs)
    rng = random.Random(f"sft {config.seed}")
    batches = []
    for _ in range(config.epochs):
        epoch = rng.sample(examples, len(examples))
        batches += [epoch[first : first + per_step] for first in range(0, len(epoch), per_step)]
    if len(batches) < LEAST_STEPS:
        shown = f"{len(examples)} examples in {config.epochs} epochs are {len(batches)} steps"
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
    """The examples of a step: as the paper has it, or fewer, so that there are enough steps."""
    return max(1, min(BATCH_SIZE, examples // LEAST_STEPS))


def negative_log_likelihood(policy: Policy, examples: Sequence[Trajectory]) -> Tensor:
    """The mean over the agent's tokens, in nats."""
    return -policy(pack([[example] for example in examples], policy.device)).logprobs.mean()


def schedule(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, none of them at 0, then a cosine decay to 0."""
    rising = math.ceil(0.1 * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


if __name__ == "__main__":
    run_program(main, settings)
