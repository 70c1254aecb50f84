"""How long a step of training takes on A100s, the GPUs of the paper: calculated for --dry-run, not measured.

    update       2 FLOP · parameters · tokens · forwards / (GPUs · FLOPS)
    generation   the turns of the longest game, token by token; each token reads all weights from memory

docs/paper.md has the calculation for the paper's run. The measured time of a step is in metrics.jsonl, as
time/rollout and time/update.
"""

import re

from prompt_r1.model.gguf import is_gguf
from prompt_r1.pair.named_agent import find_agent
from prompt_r1.programs.launcher import launcher_number
from prompt_r1.settings.agent import MINI_AGENT
from prompt_r1.settings.train import TrainConfig

TURN = 250  # tokens of the agent's usual turn
# Dense operations in bfloat16 and bytes of memory, per second. The shares of the peaks are assumed.
FLOPS = 0.4 * 312e12
BANDWIDTH = 0.25 * 2.0e12


def step_time(config: TrainConfig, *, question: int, calls: int, reply: int) -> str:
    """A line about the time of a step; "" for the mini agent, and for a model whose size is not known.

    `question`: bytes of a question. `calls`: calls of a game. `reply`: tokens of a reply.
    """
    parameters = 0 if config.agent == MINI_AGENT else count_parameters(config.agent)
    if parameters == 0:
        return ""
    ranks = launcher_number("WORLD_SIZE", default=1)
    update = update_seconds(config, parameters, ranks, question=question, calls=calls, reply=reply)
    bytes_of_weights = 2 * parameters
    generation = config.game.max_turns * min(TURN, config.max_new) * bytes_of_weights / BANDWIDTH
    hours = config.steps * (update + generation) / 3600
    return (
        f"A step on {ranks} × A100: {generation:.0f} s to generate, {update:.0f} s to update, beside its "
        f"calls; {config.steps:,} steps: {hours:,.1f} h. This is calculated, from {parameters / 1e9:.1f} "
        "billion parameters and the GPU's peak, and was not measured."
    )


def update_seconds(
    config: TrainConfig, parameters: int, ranks: int, *, question: int, calls: int, reply: int
) -> float:
    """The seconds of the update of a step. The games of a group share their opening.

    `question`: bytes of a question. `calls`: calls of a game. `reply`: tokens of a reply.
    """
    opening = (len(config.instruction_text) + question) // 4
    read = min(reply, config.max_reply_tokens or reply)
    game = (calls + 1) * min(TURN, config.max_new) + calls * read
    tokens = config.questions * (opening + config.group_size * game)
    mini_batches = max(1.0, config.questions * config.group_size / config.mini_batch)
    forwards = 3.0  # A backward counts as two.
    if config.checkpointing:
        forwards += 1  # the recomputation
    if config.kl_coef:
        forwards += 1  # the reference
    forwards += 1 - 1 / mini_batches  # π_old of all mini-batches but the first
    return 2 * parameters * tokens * forwards / (ranks * FLOPS)


def count_parameters(agent: str) -> int:
    """The parameters of a model, from its configuration or else from its name, such as Qwen3-4B; else 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if is_gguf(agent):
        return 0
    path = find_agent(agent, seed=0)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # It was not downloaded yet, or it is no model that transformers knows.
        in_name = re.search(r"(\d+(\.\d+)?)B\b", agent)
        return round(float(in_name[1]) * 1e9) if in_name else 0
    return sum(weight.numel() for weight in model.parameters())
