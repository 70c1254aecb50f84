"""Supervised fine-tuning on games. Only the agent's own tokens enter the loss.

The settings are the paper's (Table 7), and LLaMA-Factory's where the paper gives none.
"""

import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from prompt_r1.errors import UsageError
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.fine_tuning import fine_tune
from prompt_r1.model.machine import pick_device, use_threads
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.model.sharding import weight_norm
from prompt_r1.pair.agent import load_agent
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.programs.files import make_folder
from prompt_r1.programs.folders import is_leftover
from prompt_r1.programs.progress import progress_bar
from prompt_r1.protocol import Codec
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.training.export import export_agent
from prompt_r1.training.models import load_learner, with_adapters
from prompt_r1.training.settings import FineTuningConfig
from prompt_r1.types import Trajectory

logger = logging.getLogger(__name__)

BATCH_SIZE = 32  # examples of an optimiser step: the paper's 4 × 8
MIN_STEPS = 30  # Fewer steps teach little, so few examples get smaller batches.


def fine_tune_agent(
    examples: Callable[[Codec], Sequence[Trajectory]],
    config: FineTuningConfig,
    agent_config: AgentConfig,
    out: Path,
) -> Path:
    """Fine-tune an agent on games, and return its folder.

    `examples` gives the games as the agent's codec encodes them. `config` says how the agent is trained, and
    `agent_config` how it will play; the latter is saved with it. The metrics of the steps are written to
    metrics.jsonl beside the agent's folder.
    """
    make_folder(out, _is_fine_tuning, "a fine-tuning")
    device = pick_device(config.device)
    use_threads(config.threads, in_training=agent_config.threads)
    start = resolve_agent(config.agent).make(agent_config.seed)
    # A policy divides its logits by the temperature. The likelihood of the games is learned at temperature 1,
    # at which `rft` has sampled them, whatever the temperature of the agent's training was.
    agent = load_agent(start, replace(agent_config, temperature=1.0), device)
    single_rank = Ranks(0, 1, agent.policy.device)
    if config.rank:
        policy = with_adapters(agent.policy, rank=config.rank, alpha=2 * config.rank, seed=config.seed)
    else:
        policy = load_learner(start, agent.policy, single_rank, offload=False)
    if policy.device.type == "cuda":
        policy.checkpoint_activations()
    learned = within_cutoff(examples(agent.codec), config.cutoff, agent.codec)
    metrics: dict[str, float] = {}  # the metrics of the last step
    with (out / "metrics.jsonl").open("w", buffering=1) as file:
        for metrics in train_weights(policy, learned, config):
            file.write(json.dumps(metrics) + "\n")
    if not math.isfinite(weight_norm(policy)):
        raise UsageError("the weights are not finite and are not saved: give a smaller --lr")
    export_agent(policy, str(start), agent_config, out / "agent", metrics=metrics, ranks=single_rank)
    return out / "agent"


def _is_fine_tuning(folder: Path) -> bool:
    """Whether a fine-tuning, perhaps a killed one, wrote all files in a folder."""
    names = {path.name for path in folder.iterdir()}
    return all(name in ("metrics.jsonl", "agent") or is_leftover(name) for name in names)


def within_cutoff(examples: Sequence[Trajectory], cutoff: int, codec: Codec) -> list[Trajectory]:
    """Cut the examples to at most `cutoff` tokens. Leave out an example that then has no token of the agent.

    Raises UsageError if none is left.
    """
    long = sum(len(example.tokens) > cutoff for example in examples)
    if long:
        shown = f"{long} of {len(examples)} examples"
        logger.warning("%s have more than --cutoff %d tokens, and are cut", shown, cutoff)
    shortened = [cut(example, cutoff, tail=len(codec.opening_tail)) for example in examples]
    used = [example for example in shortened if any(example.sampled)]
    if not used:
        raise UsageError(f"--cutoff {cutoff} leaves no token of the agent to train on: give a larger one")
    return used


def train_weights(
    policy: Policy, examples: Sequence[Trajectory], config: FineTuningConfig
) -> Iterator[dict[str, float]]:
    """Take AdamW steps, and yield the metrics of each."""
    per_step = config.batch_size or batch_size_for(len(examples) * config.epochs)
    rng = random.Random(f"sft {config.seed}")
    batches = []
    for _ in range(config.epochs):
        epoch = rng.sample(examples, len(examples))
        for first in range(0, len(epoch), per_step):
            batches.append(epoch[first : first + per_step])
    if len(batches) < MIN_STEPS:
        shown = f"{len(examples)} examples in {config.epochs} epochs are {len(batches)} steps"
        logger.warning("%s, which teach little: give more examples, or more --epochs", shown)

    where = "" if policy.device.type == "cuda" else f", threads: {torch.get_num_threads()}"
    return fine_tune(
        policy.trained_parameters(),
        progress_bar(batches, name=f"fine-tuning{where}", unit="step"),
        partial(negative_log_likelihood, policy),
        rate=lambda step: config.lr * schedule(step, len(batches)),
        betas=(0.9, 0.999),
        micro_batch=config.micro_batch,
    )


def cut(example: Trajectory, cutoff: int, *, tail: int) -> Trajectory:
    """Cut an example to at most `cutoff` tokens.

    First the question loses tokens at its end, until the example fits or its opening has only half of
    `cutoff`. The last `tail` tokens of the opening stay: the instruction, and the beginning of the agent's
    turn. If the example is still too long, it loses tokens at its own end.

    For example, 300 tokens of opening and 100 of turns are cut to 120, with a tail of 20. The opening keeps
    60: its first 40 and its last 20. The turns keep their first 60.
    """
    opening = example.opening_length
    surplus = max(0, len(example.tokens) - cutoff)
    half = min(opening, max(1, cutoff // 2))
    kept = max(half, opening - surplus)  # tokens of the opening
    kept_tail = min(tail, kept)
    kept_head = kept - kept_tail

    columns = [*range(kept_head), *range(opening - kept_tail, len(example.tokens))][:cutoff]
    return Trajectory(
        example.question,
        tokens=[example.tokens[column] for column in columns],
        sampled=[example.sampled[column] for column in columns],
        logprobs=[example.logprobs[column] for column in columns],
    )


def batch_size_for(examples: int) -> int:
    """How many examples a step has: the paper's number, or fewer, so that there are enough steps."""
    return max(1, min(BATCH_SIZE, examples // MIN_STEPS))


def negative_log_likelihood(policy: Policy, examples: Sequence[Trajectory]) -> Tensor:
    """The mean negative log-likelihood of the agent's tokens, in nats."""
    groups = [[example] for example in examples]
    scores = policy(pack(groups, policy.device))
    return -scores.logprobs.mean()


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of its peak.

    It rises linearly in the first tenth of the steps, and then decays to 0 like a cosine. The first step is
    above 0, because a step at 0 teaches nothing.
    """
    rising = math.ceil(0.1 * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    decayed = (step - rising) / max(steps - rising, 1)
    return 0.5 * (1 + math.cos(math.pi * decayed))
