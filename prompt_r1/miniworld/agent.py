"""The mini agent, a Qwen3 of half a million parameters, and its warm start.

It knows the format, all strategies and how to copy names from a reply, but no fact of the world in which it
will play.
"""

import random
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from prompt_r1.miniworld.demonstrations import Demonstration, demonstrations
from prompt_r1.model.fine_tuning import fine_tune
from prompt_r1.programs.folders import build_folder
from prompt_r1.programs.progress import progress_bar
from prompt_r1.protocol import TAGS, Codec
from prompt_r1.rollout import trajectory_of
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.types import Question, Trajectory, Turn

INSTRUCTION = INSTRUCTIONS["short"]
EMBEDDED = Path(__file__).parent / "agents"  # the agents that come with the package
BATCH = 8  # demonstrations in a step of the warm start
LEARNING_RATE = 3e-3  # the highest learning rate of the warm start
SHOWN_TO_TOKENIZER = 5000  # the number of demonstrations that the tokenizer is trained on
VERSION = 2  # If the code builds other agents than before, raise the version and run this file.

PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

MiniAgent = tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]


def mini_agent(seed: int, cache_dir: Path | str) -> Path:
    """The Hugging Face folder of the warm-started agent of `seed`.

    The agent of seed 0 comes with the package. Others are built by the first call and kept in `cache_dir`.
    """
    name = f"mini-agent-{seed}-v{VERSION}"
    if (EMBEDDED / name).is_dir():
        return EMBEDDED / name
    folder = Path(cache_dir) / name
    if folder.is_dir():
        return folder
    tqdm.write(
        f"Building the mini agent of seed {seed}: about a minute, once; it is kept in {folder}",
        file=sys.stderr,
    )
    build_folder(folder, partial(_build_and_save, seed))
    return folder


def _build_and_save(seed: int, folder: Path) -> None:
    model, tokenizer = build_agent(seed, demonstrations(seed))
    transformers_logging.disable_progress_bar()  # Where nobody reads stderr, it would raise BrokenPipeError.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_agent(seed: int, examples: Iterable[Demonstration], *, steps: int = 1500) -> MiniAgent:
    """Warm-start an agent on demonstrations.

    It computes in one thread, which is fastest for a tiny model. So the weights do not depend on the number
    of cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _warm_start(seed, list(examples), steps)
    finally:
        torch.set_num_threads(threads)


def _warm_start(seed: int, examples: Sequence[Demonstration], steps: int) -> MiniAgent:
    texts = [plain_text(question, turns) for question, turns in examples[:SHOWN_TO_TOKENIZER]]
    tokenizer = train_tokenizer(texts, vocabulary=1400)
    codec = Codec(tokenizer, INSTRUCTION)
    model = new_model(tokenizer, seed)
    trajectories = [trajectory_of(question, turns, codec) for question, turns in examples]
    batches = _batches(trajectories, BATCH, random.Random(f"warm start {seed}"))

    def rate(step: int) -> float:
        """50 steps of warm-up, constant up to 40 % of all steps, then linear down to 5 %."""
        warm_up = min(1.0, (step + 1) / 50)
        decay = max(0.0, step / steps - 0.4) / 0.6
        return LEARNING_RATE * (warm_up * (1.0 - 0.95 * decay))

    losses = fine_tune(
        list(model.parameters()),
        islice(batches, steps),
        partial(next_token_loss, model),
        rate=rate,
        betas=(0.9, 0.98),
        micro_batch=BATCH,
    )
    for _ in progress_bar(losses, name="warm start", unit="step", total=steps):
        pass
    return model, tokenizer


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Make a tiny Qwen3 whose output projections start as the transposes of the value projections.

    With this mimetic initialisation, attention copies tokens from the start. If it attends to a token x, it
    adds W_o W_v x to the residual stream. With W_o = W_vᵀ this is W_vᵀ W_v x, roughly a multiple of x: for a
    random W_v, the mean of W_vᵀ W_v is a multiple of the identity.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # transformers draws from the global generator.
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.copy_(layer.self_attn.v_proj.weight.T)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    return model


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`. Its vocabulary has all 256 bytes, so any text can be encoded and decoded.

    Each tag is one added token, but not a special one: like Qwen3's `<think>`, it is text of the agent, which
    decoding keeps.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def plain_text(question: Question, turns: list[Turn]) -> str:
    """The text of a demonstration for `train_tokenizer`, without tags: no merge may contain part of a tag."""
    parts = [f"user\nQuestion: {question.text}\n{INSTRUCTION}"]
    parts += [f"assistant\n{turn.text}\nuser\n{turn.reply or ''}" for turn in turns]
    return re.sub("|".join(TAGS), "\n", "\n".join(parts))


def _batches(
    trajectories: list[Trajectory], batch_size: int, rng: random.Random
) -> Iterator[list[Trajectory]]:
    """Yield batches in random order without end. The trajectories of a batch are of similar length."""
    while True:
        shuffled = rng.sample(trajectories, len(trajectories))
        shuffled.sort(key=lambda trajectory: len(trajectory.tokens))
        batches = [shuffled[start : start + batch_size] for start in range(0, len(shuffled), batch_size)]
        yield from rng.sample(batches, len(batches))


def next_token_loss(model: Qwen3ForCausalLM, batch: Sequence[Trajectory]) -> Tensor:
    """The mean cross-entropy of the sampled tokens of a batch."""
    tokens = pad_sequence([torch.tensor(game.tokens) for game in batch], batch_first=True)  # (B, T)
    sampled = pad_sequence([torch.tensor(game.sampled) for game in batch], batch_first=True)  # (B, T)
    # Right padding and a causal model: real tokens cannot see the padding, so no mask is needed.
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state  # (B, T, D)
    is_target = sampled[:, 1:]
    logits = model.lm_head(hidden[:, :-1][is_target])  # (N, V)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:][is_target])


if __name__ == "__main__":  # `python -m prompt_r1.miniworld.agent`, after VERSION has been raised
    if sys.argv[1:]:
        sys.exit("This rebuilds the agents of the package. It takes no arguments.")
    shutil.rmtree(EMBEDDED, ignore_errors=True)
    print(mini_agent(0, EMBEDDED))
