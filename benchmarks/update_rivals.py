"""Rivals of our update: TRL's GRPO trainer, and a naive update with all logits of padded rows."""

import tempfile
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from prompt_r1.types import ScoredGame

CLIP = 0.2
Rows = dict[str, Tensor]
"""A micro-batch (B, …) in the form of TRL's inputs."""


def padded(scored_games: Sequence[ScoredGame], references: Sequence[Tensor] | None = None) -> Rows:
    """Games as TRL's inputs: prompts (B, P) padded at the left, completions (B, C) at the right.

    The old log-probabilities are the recorded ones. `references` has the reference's log-probabilities of the
    agent's tokens, for each game.
    """
    games = [scored.trajectory for scored in scored_games]
    prompts = [torch.tensor(game.tokens[: game.opening_length]) for game in games]
    completions = [torch.tensor(game.tokens[game.opening_length :]) for game in games]
    own = [torch.tensor(game.sampled[game.opening_length :]) for game in games]
    old = [torch.tensor(game.logprobs[game.opening_length :]) for game in games]
    rows = {
        "prompt_ids": _pad(prompts, side="left"),
        "prompt_mask": _pad([torch.ones_like(prompt) for prompt in prompts], side="left"),
        "completion_ids": _pad(completions),
        "completion_mask": _pad([torch.ones_like(completion) for completion in completions]),
        "tool_mask": _pad(own).long(),
        "old_per_token_logps": _pad(old),
        "advantages": torch.tensor([scored.advantage for scored in scored_games]),
        "num_items_in_batch": torch.stack([mask.sum() for mask in own]).sum(),
    }
    if references is not None:
        reference_rows = [
            torch.zeros(len(mask)).masked_scatter(mask, logprobs)
            for mask, logprobs in zip(own, references, strict=True)
        ]
        rows["ref_per_token_logps"] = _pad(reference_rows)
    return rows


def _pad(rows: list[Tensor], *, side: str = "right") -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_side=side)


def trl_trainer(model: PreTrainedModel, *, rows: int, batches: int, kl_coef: float = 0.0, **options):
    """TRL's GRPO trainer of a model, for updates of `batches` micro-batches of `rows` games.

    Raises ImportError if TRL is not installed.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    vocabulary = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<end>")
    folder = tempfile.mkdtemp(prefix="trl-")  # TRL requires a folder, although nothing is written.
    config = GRPOConfig(
        output_dir=folder,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=rows,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batches,
        beta=0.0,
        use_bias_correction_kl=False,
        epsilon=CLIP,
        disable_tqdm=True,
        **options,
    )
    data = Dataset.from_list([{"prompt": "x"}] * rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
        )
    # Beta is set here, because with beta > 0 the constructor would load a reference model.
    trainer.beta = kl_coef
    trainer.current_gradient_accumulation_steps = batches
    trainer.model.train()
    return trainer


def trl_backward(trainer, micro_batches: Sequence[Rows]) -> float:
    """Compute TRL's loss of an update. The gradients stay in the model."""
    total = 0.0
    for rows in micro_batches:
        loss = trainer.compute_loss(trainer.model, rows)
        loss.backward()
        total += loss.item()
    return total


def naive_backward(model: PreTrainedModel, micro_batches: Sequence[Rows]) -> float:
    """Compute eq. 17 without KL, on policy, from all logits of padded rows.

    The gradients stay in the model.
    """
    games = sum(len(rows["advantages"]) for rows in micro_batches)
    total = 0.0
    for rows in micro_batches:
        tokens = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        attention = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        mask, advantage = rows["tool_mask"], rows["advantages"][:, None]
        logits = model(tokens, attention_mask=attention, use_cache=False).logits[:, :-1]
        log_p = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0][:, -mask.shape[1] :]
        ratio = (log_p - log_p.detach()).exp()  # The weights have not changed, so it is 1.
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = ((-surrogate * mask).sum(1) / mask.sum(1)).sum() / games
        loss.backward()
        total += loss.item()
    return total
