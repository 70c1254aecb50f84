"""`sft`: supervised fine-tuning of the agent on questions and gold answers, with LoRA: no environment.

    python -m prompt_r1.baselines.sft --agent mini --data mini --out runs/mini-sft

The settings are those of the paper's Table 7 and, where that is silent, LLaMA-Factory's. The agent reads the
question with the words that ask for <answer> tags and learns to write the first gold answer between them,
without thinking; the loss is on what it writes. The frame is the tokenizer's chat template as in all games.
A fine-tuned agent is a folder like any other: evaluate.py --sft-agent, or --agent.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.agent.names import AgentSpec, find_agent, trained_config
from prompt_r1.agent.packing import pack
from prompt_r1.agent.remote import parse_remote
from prompt_r1.baselines.games import Game
from prompt_r1.baselines.lora import add_lora, merge_lora
from prompt_r1.baselines.method import Attempt, Ledger
from prompt_r1.cli.command_line import parse_arguments, run_program
from prompt_r1.config.methods import SftConfig
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.data.named import find_questions
from prompt_r1.distributed.ranks import Ranks, pick_device
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.storage.export import export_agent
from prompt_r1.types import Completion, Question, Trajectory

ANSWER_TAGS = ("<answer>", "</answer>")


def main(arguments: list[str]) -> None:
    """Fine-tune from a command line."""
    config = parse_arguments(
        SftConfig, "python -m prompt_r1.baselines.sft", "Fine-tune an agent on gold answers.", arguments
    )
    if not config.data:
        raise UsageError("nothing to learn from: give --data FILE …, or --data mini")
    questions = find_questions(config.data, "train", config.seed)
    folder = fine_tune(questions, config, Path(config.out or f"runs/sft-seed{config.seed}"), quiet=False)
    print(f"The agent is kept in {folder}. Score it:\npython evaluate.py --method sft --sft-agent {folder}")


def fine_tune(questions: Sequence[Question], config: SftConfig, out: Path, *, quiet: bool) -> Path:
    """The folder of the agent that learnt from the questions; metrics.jsonl lies beside it."""
    for name in ("rank", "lr", "epochs", "batch_size", "accumulate", "cutoff"):
        if not getattr(config, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {getattr(config, name)}")
    if not questions:
        raise UsageError("sft needs training questions: give --train-data")
    game = game_of(config)
    if parse_remote(config.agent):
        raise UsageError(f"--agent {config.agent}: an agent behind an endpoint plays, but cannot be trained")
    start = find_agent(config.agent, config.seed)
    player = load_agent(start, game, pick_device(config.device))
    model = player.policy.model
    if config.checkpointing:
        player.policy.checkpoint_activations()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        trainable = add_lora(model, rank=config.rank, alpha=config.alpha)
    examples = [example_of(question, player, config.cutoff) for question in questions]
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    with (out / "metrics.jsonl").open("w", buffering=1) as file:
        for line in learn(player, trainable, examples, config, quiet=quiet):
            file.write(json.dumps(line) + "\n")
            lines.append(line)
    merge_lora(model)
    alone = Ranks(0, 1, player.policy.device)
    failed = export_agent(
        player.policy, start, game, out / "agent", lines=lines, ranks=alone, card=card(config)
    )
    if failed:
        raise Resumable(f"the fine-tuned agent could not be written: {failed}")
    return out / "agent"


def card(config: SftConfig) -> str:
    """The README.md of the agent's folder."""
    settings = "\n".join(f"| {name} | {value} |" for name, value in asdict(config).items() if name != "out")
    return (
        "# An agent fine-tuned on gold answers\n\nA baseline of Prompt-R1: LoRA, merged into the weights.\n\n"
        f"| setting | value |\n|---|---|\n{settings}\n"
    )


def game_of(config: SftConfig) -> TrainConfig:
    """How the fine-tuned agent plays: one turn, nobody to ask."""
    preset = TrainConfig(**PRESETS["mini" if config.agent == "mini" else "paper"])
    return replace(preset, agent=config.agent, env="none", rule="alone", max_turns=1, instruction="answer",
                   seed=config.seed, data=config.data, lr=config.lr)  # fmt: skip


def example_of(question: Question, player: Agent, cutoff: int) -> Trajectory:
    """Question and first gold answer as a game of one turn, cut at `cutoff` tokens."""
    codec = player.codec
    opening, end = (codec.tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in ANSWER_TAGS)
    answer = [*opening, *codec.encode_untrusted(question.answers[0]), *end, codec.turn_end]
    example = Trajectory(question)
    example.add_context(codec.opening(question.text)[:cutoff])
    answer = answer[: cutoff - len(example.tokens)]
    example.add_sampled(Completion(answer, [0.0] * len(answer), finished=True))
    return example


def learn(
    player: Agent,
    trainable: list[nn.Parameter],
    examples: Sequence[Trajectory],
    config: SftConfig,
    *,
    quiet: bool,
) -> Iterator[dict[str, float]]:
    """Epochs of AdamW steps over `batch_size` × `accumulate` examples; one line of metrics a step."""
    examples = [example for example in examples if any(example.sampled)]
    if not examples:
        raise UsageError(f"no answer is left to learn: every question takes {config.cutoff} tokens or more")
    per_step = config.batch_size * config.accumulate
    steps = config.epochs * math.ceil(len(examples) / per_step)
    optimizer = torch.optim.AdamW(trainable, lr=config.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    rng = random.Random(f"sft {config.seed}")
    epochs = [rng.sample(examples, len(examples)) for _ in range(config.epochs)]
    batches = [
        epoch[first : first + per_step] for epoch in epochs for first in range(0, len(epoch), per_step)
    ]
    for step, batch in enumerate(tqdm(batches, desc="sft", unit="step", disable=True if quiet else None)):
        lr = config.lr * schedule(step, steps)
        optimizer.param_groups[0]["lr"] = lr
        targets = sum(sum(example.sampled) for example in batch)
        loss = 0.0
        for start in range(0, len(batch), config.batch_size):
            part = negative_log_likelihood(player, batch[start : start + config.batch_size]) / targets
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield {"step": step + 1, "loss": loss, "lr": lr}


def negative_log_likelihood(player: Agent, examples: Sequence[Trajectory]) -> Tensor:
    """The sum over the tokens of the answers, in nats."""
    policy = player.policy
    return -policy(pack([[example] for example in examples], policy.device)).logprobs.sum()


def schedule(step: int, steps: int, *, warm_up: float = 0.1) -> float:
    """Linear up over the first tenth, then half a cosine down to 0."""
    rising = math.ceil(warm_up * steps)
    if step < rising:
        return step / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


class FineTuned:
    """Fine-tunes into a folder, unless the same settings did so before; then lets the agent answer."""

    def __init__(
        self, config: SftConfig, place: Path, *, load: Callable[[AgentSpec], Agent], temperature: float
    ) -> None:
        self.name = "sft"
        self.ledger = Ledger()
        self._config = config
        self._place = place
        known = AgentSpec(place / "agent", game_of(config), start=config.agent)
        self._agent = Game(
            "sft", partial(load, known), None, game=known.config, temperature=temperature, thinks=False
        )

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        if trained_config(self._place / "agent") != game_of(self._config):
            fine_tune(train, self._config, self._place, quiet=False)

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        return await self._agent.answer(question, sample=sample, seed=seed)


if __name__ == "__main__":
    run_program(main)
