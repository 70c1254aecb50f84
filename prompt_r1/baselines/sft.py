"""`sft`: fine-tune the agent on gold answers, with LoRA.

    python -m prompt_r1.baselines.sft --agent mini --data mini --out runs/mini-sft

The settings are those of the paper's Table 7, and LLaMA-Factory's where the paper gives none. The prompt is
the question with the instruction to answer in <answer> tags, in the tokenizer's chat template as in all
games; the target is the first gold answer in these tags, without thinking. Only the target enters the loss.
A fine-tuned agent is a folder like any other: evaluate.py takes it as --sft-agent or --agent.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from tqdm import tqdm

from prompt_r1.agent.adapters import merge_lora
from prompt_r1.agent.agent import load_agent
from prompt_r1.agent.model_check import add_checked_lora
from prompt_r1.agent.names import exported_step, find_agent, trained_config
from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.remote import parse_remote
from prompt_r1.baselines.games import AgentMethod
from prompt_r1.baselines.method import Method
from prompt_r1.cli.command_line import parse_arguments, run_program
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.fields import MINI_AGENTS, check_ranges
from prompt_r1.config.methods import SftConfig
from prompt_r1.config.train import agent_preset
from prompt_r1.data.questions import find_questions
from prompt_r1.data.sampler import digest_of
from prompt_r1.distributed.ranks import Ranks, pick_device
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.fine_tuning import fine_tune
from prompt_r1.foreign import check_no_links
from prompt_r1.protocol import Codec
from prompt_r1.storage.export import export_agent
from prompt_r1.types import Completion, Question, Trajectory

ANSWER_TAGS = ("<answer>", "</answer>")
LESSON_FILE = "lesson.txt"  # what the agent has learned from


def main(arguments: list[str]) -> None:
    """Fine-tune from a command line."""
    config = parse_arguments(
        SftConfig, "python -m prompt_r1.baselines.sft", "Fine-tune an agent on gold answers.", arguments
    )
    if not config.data:
        raise UsageError("no training questions: give --data FILE …, or --data mini")
    questions = find_questions(config.data, "train", config.seed)
    folder = learn_answers(questions, config, Path(config.out or f"runs/sft-seed{config.seed}"))
    print(f"The agent is saved in {folder}. Score it:\npython evaluate.py --method sft --sft-agent {folder}")


def learn_answers(questions: Sequence[Question], config: SftConfig, out: Path) -> Path:
    """Fine-tune an agent on the answers of questions; the folder of the result."""
    if not questions:
        raise UsageError("sft needs training questions: give --train-data")

    def examples(codec: Codec) -> list[Trajectory]:
        return [example_of(question, codec, config.cutoff) for question in questions]

    return fine_tune_agent(examples, config, one_turn_config(config), out)


def fine_tune_agent(
    examples: Callable[[Codec], list[Trajectory]], config: SftConfig, trained_as: AgentConfig, out: Path
) -> Path:
    """Fine-tune an agent on games, for the game `trained_as`; the folder of the result.

    Writes metrics.jsonl beside it.
    """
    check_ranges(config)
    _make_folder(out)
    if parse_remote(config.agent):
        raise UsageError(f"--agent {config.agent}: an agent behind an endpoint plays, but cannot be trained")
    start = find_agent(config.agent, config.seed)
    agent = load_agent(start, trained_as, pick_device(config.device))
    if config.checkpointing:
        agent.policy.checkpoint_activations()
    trainable = add_checked_lora(agent.policy, rank=config.rank, alpha=config.alpha, seed=config.seed)
    with (out / "metrics.jsonl").open("w", buffering=1) as file:
        for line in train_adapters(agent.policy, trainable, examples(agent.codec), config):
            file.write(json.dumps(line) + "\n")
    merge_lora(agent.policy.model)
    alone = Ranks(0, 1, agent.policy.device)
    if not math.isfinite(alone.weight_norm(agent.policy)):
        raise UsageError("the weights are not finite and are not saved: give a smaller --lr")
    error = export_agent(
        agent.policy,
        start,
        trained_as,
        out / "agent",
        metrics=line,
        ranks=alone,
        frame=agent.codec.frame,
        card=lambda base: model_card(config),
    )
    if error:
        raise Resumable(f"the fine-tuned agent could not be written: {error}")
    return out / "agent"


def _make_folder(out: Path) -> None:
    """Make the folder of the result. Raises UsageError for a folder with files of another program."""
    agent = out / "agent"
    ours = {"metrics.jsonl", LESSON_FILE, "agent", ".agent.tmp", ".agent.old"}
    try:
        check_no_links(out)
        out.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in out.iterdir()}
        if names - ours or (agent.exists() and exported_step(agent) < 0):
            raise UsageError(
                f"{out}: there are files in it that are not of a fine-tuning; give a new or an empty folder"
            )
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}; give a folder that can be written") from None


def model_card(config: SftConfig) -> str:
    """The README.md of the agent's folder."""
    rows = [[name, str(value)] for name, value in asdict(config).items() if name != "out"]
    return (
        "# A fine-tuned agent\n\nA baseline of Prompt-R1: LoRA, merged into the weights.\n\n"
        f"{markdown_table(['setting', 'value'], rows, left=2)}\n"
    )


def one_turn_config(config: SftConfig) -> AgentConfig:
    """The training config whose game the fine-tuned agent plays: one turn, without an environment."""
    preset = agent_preset("mini" if config.agent in MINI_AGENTS else "paper")
    return replace(
        preset,
        agent=config.agent,
        env="none",
        rule="alone",
        max_turns=1,
        instruction="answer",
        seed=config.seed,
        data=config.data,
    )


def example_of(question: Question, codec: Codec, cutoff: int) -> Trajectory:
    """A question and its first gold answer as a game of one turn, cut off at `cutoff` tokens."""
    tags = ("</think>\n" if codec.frame.opened else "") + ANSWER_TAGS[0], ANSWER_TAGS[1]
    opening, end = map(codec.encode_trusted, tags)
    answer = [*opening, *codec.encode_untrusted(question.answers[0]), *end, codec.turn_end]
    example = Trajectory(question)
    example.add_context(codec.opening(question.text)[:cutoff])
    answer = answer[: cutoff - len(example.tokens)]
    example.add_sampled(Completion(answer, [0.0] * len(answer), finished=True))
    return example


def train_adapters(
    policy: Policy, trainable: list[nn.Parameter], examples: Sequence[Trajectory], config: SftConfig
) -> Iterator[dict[str, float]]:
    """AdamW steps over `batch_size` × `accumulate` examples each; yields the metrics of each step."""
    examples = [example for example in examples if any(example.sampled)]
    if not examples:
        raise UsageError(
            f"no answer is left to train on: every question takes {config.cutoff} tokens or more"
        )
    per_step = config.batch_size * config.accumulate
    rng = random.Random(f"sft {config.seed}")
    batches = []
    for _ in range(config.epochs):
        epoch = rng.sample(examples, len(examples))
        batches += [epoch[first : first + per_step] for first in range(0, len(epoch), per_step)]

    def rate(step: int) -> float:
        return config.lr * schedule(step, len(batches))

    losses = fine_tune(
        trainable,
        tqdm(batches, desc="fine-tuning", unit="step", disable=None),
        partial(negative_log_likelihood, policy),
        rate=rate,
        betas=(0.9, 0.999),
        micro_batch=config.batch_size,
    )
    for step, loss in enumerate(losses):
        yield {"step": step + 1, "loss": loss, "lr": rate(step)}


def negative_log_likelihood(policy: Policy, examples: Sequence[Trajectory]) -> Tensor:
    """The mean over the tokens of the answers, in nats."""
    return -policy(pack([[example] for example in examples], policy.device)).logprobs.mean()


def schedule(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine decay to 0."""
    rising = math.ceil(0.1 * steps)
    if step < rising:
        return step / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


@dataclass
class FineTuned(Method):
    """Plays with an agent that it fine-tunes on gold answers, unless its folder holds one of this lesson."""

    settings: SftConfig
    game: AgentConfig  # how the agent plays
    folder: Path
    player: AgentMethod  # plays with the agent that will be in `folder`

    def lesson(self, train: Sequence[Question]) -> str:
        """What the agent learns from, and how."""
        return f"{digest_of(train) if train else ''} with learning rate {self.settings.lr}"

    async def learn(self, train: Sequence[Question]) -> None:
        """Fine-tune the agent of `folder`. Raises UsageError if there is nothing to learn from."""
        learn_answers(train, self.settings, self.folder)

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        file, lesson = self.folder / LESSON_FILE, self.lesson(train)
        learned = file.read_text("utf-8", errors="replace") if file.is_file() else ""
        if learned != lesson or trained_config(self.folder / "agent") != self.game:
            file.unlink(missing_ok=True)
            await self.learn(train)
            file.write_text(lesson, "utf-8")

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        return await self.player.answer(question, sample=sample, seed=seed)


if __name__ == "__main__":
    run_program(main)
