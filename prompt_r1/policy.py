"""The agent's weights: load a Hugging Face causal model; tokens in, log-probabilities out."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from prompt_r1 import attention
from prompt_r1.fsdp import shard, whole
from prompt_r1.hub import loading_options
from prompt_r1.types import UsageError

CHUNK = 1024  # scored tokens whose logits exist at the same time


class Scores(NamedTuple):
    """What a policy says of tokens that are given. A tuple: FSDP2 looks for tensors in no other class."""

    logprobs: Tensor  # (B, T-1) float32 nats of token t+1 given all before; 0 where not scored
    entropy: Tensor  # (B, T-1) nats, no gradient; 0 where not scored


class Policy(nn.Module):
    """A causal language model that returns log-probabilities: [tokens × vocabulary] is never whole."""

    def __init__(self, model: PreTrainedModel, *, compute: torch.dtype, temperature: float = 1.0) -> None:
        """`compute` is the dtype of matrix products; the weights keep their own (float32 for those that
        learn: a step of 1e-6 is lost in bfloat16).
        """
        super().__init__()
        self.model = model
        self.device = model.device  # where it computes; sharded weights may lie elsewhere
        self.compute = compute
        self.temperature = temperature  # logits are divided by it: what is trained is what is sampled

    def forward(self, tokens: Tensor, scored: Tensor) -> Scores:
        """Score tokens (B, T), right-padded, at the positions scored (B, T-1) bool: entry t is about token
        t+1.

        Right padding and a causal model: real tokens cannot see the padding, so no mask is needed.
        """
        hidden = self.hidden_states(tokens[:, :-1])  # (B, T-1, hidden)
        weight = self.model.get_output_embeddings().weight  # (V, hidden)
        picked = _ChunkedLogprobs.apply(
            hidden[scored].to(self.compute), weight, tokens[:, 1:][scored], self.temperature
        )
        logprobs = torch.zeros(scored.shape, dtype=torch.float32, device=tokens.device)
        entropy = torch.zeros_like(logprobs)
        return Scores(logprobs.masked_scatter(scored, picked[0]), entropy.masked_scatter(scored, picked[1]))

    def hidden_states(self, tokens: Tensor, **forward: object) -> Tensor:
        """Last hidden states (B, T, hidden); keywords of the forward reach the attention function."""
        with torch.autocast(tokens.device.type, self.compute, enabled=self.compute.itemsize < 4):
            return self.model.base_model(input_ids=tokens, use_cache=False, **forward).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (R, V), float32, of hidden states (R, hidden)."""
        return _logits(hidden.to(self.compute), self.model.get_output_embeddings().weight)

    def shard(self, mesh: DeviceMesh, device: torch.device, *, offload: bool) -> None:
        """Keep a slice of every weight on each rank; from now on every forward is called by all ranks."""
        shard(self, self.model.base_model.layers, mesh=mesh, compute=self.compute, offload=offload)
        self.device = device

    @torch.no_grad()
    def follow(self, learner: "Policy") -> None:
        """Take over the weights of another copy, in this one's dtype. Sharded ones are gathered one by one, so
        that no second whole copy exists: called by every rank then.
        """
        if learner is not self:
            for mine, new in zip(self.parameters(), learner.parameters(), strict=True):
                mine.copy_(whole(new.to(mine.device, mine.dtype)))


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy, chunk by chunk.

    The logits of a chunk are dropped at once and computed again in backward: one more product with the head
    for a memory that does not grow with tokens × vocabulary.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature = temperature
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(len(targets)):
            log_p = torch.log_softmax(_logits(hidden[rows], weight) / temperature, dim=-1)  # (chunk, V)
            logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -(log_p.exp() * log_p).sum(1)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(
            weight, dtype=torch.float32
        )  # bf16 sums over many chunks would lose bits
        for rows in _chunks(len(targets)):
            # d log p[target] / d logits = (one-hot - p) / temperature
            grad_logits = torch.softmax(_logits(hidden[rows], weight) / ctx.temperature, dim=-1)
            grad_logits.mul_(-grad[rows, None]).scatter_add_(1, targets[rows, None], grad[rows, None])
            grad_logits = (grad_logits / ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight.to(hidden.dtype)
            grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.to(hidden.dtype).T).float()


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]


def load_policy(
    path: str | Path,
    *,
    device: torch.device,
    compute: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
    temperature: float = 1.0,
) -> Policy:
    """The Hugging Face causal model in a folder (or of a hub id), with our attention.

    Raises UsageError where there is no such model, or one whose logits are not hidden @ head.
    """
    attention.register()
    try:
        options = loading_options(path)
        config = AutoConfig.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=weights, attn_implementation=attention.NAME, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"no causal language model at {str(path)!r}: {_first_line(error)}") from None
    if _has_windows(config):
        raise UsageError(f"the model at {str(path)!r} attends through sliding windows: not supported")
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None or _alters_logits(config):
        raise UsageError(
            f"the model at {str(path)!r} does more to its logits than one matrix product: not supported"
        )
    return Policy(model.to(device).eval(), compute=compute, temperature=temperature)


def _alters_logits(config: object) -> bool:
    """Soft caps and scales (Gemma 2, Cohere, Granite) that the chunked log-probs do not know."""
    names = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    return any(getattr(config, name, None) not in (None, 1.0) for name in names)


def _has_windows(config: object) -> bool:
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return set(layers) != {"full_attention"}
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder (or of a hub id). Raises UsageError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, **loading_options(path))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"no tokenizer at {str(path)!r}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
