"""How long a training step takes on GPUs, calculated from the model's size and the GPU's peak.

    update       2 FLOP · parameters · tokens · forwards / (GPUs · peak · SHARE_OF_PEAK)
    generation   the turns of the longest game, token by token; each reads all weights from memory

A forward and backward with recomputation counts as four forwards; the reference, and π_old of all
mini-batches but the first, take one each. None of this was measured. It only tells hours from days.
"""

import re
from dataclasses import dataclass

from prompt_r1.model.gguf import is_gguf
from prompt_r1.pair.named_agent import find_agent
from prompt_r1.programs.launcher import launcher_number
from prompt_r1.settings.agent import MINI_AGENT
from prompt_r1.settings.train import TrainConfig

# The agent's usual turn has this many tokens.
TURN = 250
# An update reaches this share of the peak of the tensor cores (assumed).
SHARE_OF_PEAK = 0.4
# Generation reaches this share of the memory's bandwidth (assumed).
SHARE_OF_BANDWIDTH = 0.25
# Smaller models are toys, whose steps take no time on a GPU.
LEAST_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Gpu:
    """A GPU's peaks: dense bfloat16 operations per second, and bytes per second of its memory."""

    name: str
    flops: float
    bandwidth: float


GPUS = (
    Gpu("A100", 312e12, 2.0e12),
    Gpu("H100", 989e12, 3.35e12),
    Gpu("H200", 989e12, 4.8e12),
    Gpu("B200", 2250e12, 8.0e12),
    Gpu("L40S", 362e12, 0.86e12),
    Gpu("A10", 125e12, 0.6e12),
    Gpu("4090", 165e12, 1.0e12),
)


def step_time(config: TrainConfig, *, question: int, calls: int, reply: int) -> str:
    """A line about the time of a step; "" for a toy, and for a model or GPU that is not known here.

    `question`: bytes of a question. `calls`: calls of a game. `reply`: tokens of a reply.
    """
    if config.agent == MINI_AGENT:
        return ""
    gpu, where = _gpu()
    parameters = count_parameters(config.agent)
    if gpu is None or parameters < LEAST_PARAMETERS:
        return ""
    ranks = launcher_number("WORLD_SIZE", default=1)
    update = update_seconds(config, parameters, gpu, ranks, question=question, calls=calls, reply=reply)
    seconds_of_token = 2 * parameters / (gpu.bandwidth * SHARE_OF_BANDWIDTH)
    generation = seconds_of_token * config.game.max_turns * min(TURN, config.max_new)
    hours = config.steps * (update + generation) / 3600
    return (
        f"A step on {ranks} × {gpu.name}{where}: {generation:.0f} s to generate, {update:.0f} s to update, "
        f"beside its calls; {config.steps:,} steps: {hours:,.1f} h. This is calculated, from "
        f"{parameters / 1e9:.1f} billion parameters and the GPU's peak, and was not measured."
    )


def update_seconds(
    config: TrainConfig, parameters: int, gpu: Gpu, ranks: int, *, question: int, calls: int, reply: int
) -> float:
    """The seconds of the update of a step. The games of a group share their opening.

    `question`: bytes of a question. `calls`: calls of a game. `reply`: tokens of a reply.
    """
    opening = (len(config.instruction_text) + question) // 4
    read = min(reply, config.max_reply_tokens or reply)
    game = (calls + 1) * min(TURN, config.max_new) + calls * read
    tokens = config.questions * (opening + config.group_size * game)
    mini_batches = max(1.0, config.questions * config.group_size / config.mini_batch)
    forwards = 3 + config.checkpointing + bool(config.kl_coef) + (1 - 1 / mini_batches)
    return 2 * parameters * tokens * forwards / (ranks * gpu.flops * SHARE_OF_PEAK)


def _gpu() -> tuple[Gpu | None, str]:
    """The GPU of this machine and ""; without a GPU, an A100 and a note that it is assumed.

    The GPU is None if its peak is not known.
    """
    import torch

    if not torch.cuda.is_available():
        return GPUS[0], " (assumed: there is no GPU here)"
    name = torch.cuda.get_device_name()
    return next((gpu for gpu in GPUS if gpu.name in name), None), ""


def count_parameters(agent: str) -> int:
    """The parameters of a model, from its configuration or else from its name, such as Qwen3-4B; else 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if is_gguf(agent):
        return 0
    try:
        config = AutoConfig.from_pretrained(find_agent(agent, seed=0), local_files_only=True)
    except OSError:  # It was not downloaded yet.
        in_name = re.search(r"(\d+(\.\d+)?)B\b", agent)
        return round(float(in_name[1]) * 1e9) if in_name else 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())
