"""The agent's weights: load a Hugging Face causal model; tokens in, log-probabilities out."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

from prompt_r1.agent import attention
from prompt_r1.agent.hub import loading_options
from prompt_r1.agent.packed_attention import choose_attention
from prompt_r1.agent.packing import Packed
from prompt_r1.distributed.fsdp import full_tensor, shard
from prompt_r1.errors import UsageError

# Tokens whose logits exist at the same time: a CPU's cache should hold them, a GPU wants large products.
CHUNK = {"cpu": 128, "cuda": 1024}


class Scores(NamedTuple):
    """What a policy says of the N scored tokens of a packed row. A tuple: FSDP2 sees no tensors elsewhere."""

    logprobs: Tensor  # (N,) float32 nats of each token given all before
    entropy: Tensor  # (N,) nats of the distributions that it was drawn from, no gradient


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

    def forward(self, packed: Packed) -> Scores:
        """Score the agent's tokens in a packed row."""
        config = self.model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        way = choose_attention(self.device, self.compute, heads, kv_heads, dim)
        hidden = self.hidden_states(
            packed.tokens[None], position_ids=packed.positions[None], packed=partial(way, packed.groups)
        )
        weight = self.model.get_output_embeddings().weight  # (V, hidden)
        rows = hidden[0].index_select(0, packed.sources) / self.temperature  # (N, hidden)
        return Scores(*_ChunkedLogprobs.apply(rows.to(self.compute), weight, packed.targets))

    def hidden_states(self, tokens: Tensor, **forward: object) -> Tensor:
        """Last hidden states (B, T, hidden); keywords of the forward reach the attention function."""
        with torch.autocast(tokens.device.type, self.compute, enabled=self.compute.itemsize < 4):
            return self.model.base_model(input_ids=tokens, use_cache=False, **forward).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (R, V), float32, of hidden states (R, hidden)."""
        return (
            hidden.to(self.compute) @ self.model.get_output_embeddings().weight.to(self.compute).T
        ).float()

    def checkpoint_activations(self) -> None:
        """Keep only each layer's input, and compute the rest again in backward."""
        # transformers renamed it in 5.2x, and recomputes only in training mode; the models have no dropout.
        old = self.model.gradient_checkpointing_enable
        getattr(self.model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        self.train()

    def shard(self, mesh: DeviceMesh, device: torch.device, *, offload: bool) -> None:
        """Keep a slice of every weight on each rank; from now on every forward is called by all ranks."""
        layers = self.model.base_model.layers
        assert isinstance(layers, nn.ModuleList)
        shard(self, layers, mesh=mesh, compute=self.compute, offload=offload)
        self.device = device

    @torch.no_grad()
    def copy_weights_from(self, learner: "Policy") -> None:
        """Take over the weights of another copy, in this one's dtype. Sharded ones are gathered one by one
        (no second whole copy exists): then it is called by every rank.
        """
        if learner is not self:
            for mine, new in zip(self.parameters(), learner.parameters(), strict=True):
                mine.copy_(full_tensor(new.to(mine.device, mine.dtype)))


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ head.T)[target], and the entropy, chunk by chunk.

    The logits of a chunk are dropped at once and computed again in backward: one more product with the head
    for a memory that does not grow with tokens × vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        head = weight.to(hidden.dtype)
        for rows, logits, log_p in _chunks(len(targets), head):
            torch.log_softmax(_product(hidden[rows], head, into=logits), -1, out=log_p)  # (chunk, V)
            logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -torch.exp(log_p, out=logits).mul_(log_p).sum(1)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, targets = ctx.saved_tensors
        scaled = grad[:, None].to(hidden.dtype) * hidden
        grad_hidden = torch.empty_like(hidden)
        # Sums over many chunks would lose bits in bfloat16.
        grad_head = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        head = weight.to(hidden.dtype)
        for rows, logits, p in _chunks(len(targets), head):
            torch.softmax(_product(hidden[rows], head, into=logits), -1, out=p)
            # d log p[target] / d logits = one-hot - p; here its negative. Subtracted before it is rounded.
            p[torch.arange(len(p), device=p.device), targets[rows]] -= 1
            slope = p.to(hidden.dtype)
            grad_hidden[rows] = (slope @ head).mul_(-grad[rows, None])
            if grad_head.dtype == hidden.dtype:  # without a second matrix of the head's size
                grad_head.addmm_(slope.T, scaled[rows], alpha=-1)
            else:
                grad_head -= slope.T @ scaled[rows]
        return grad_hidden, grad_head.to(weight.dtype), None


def _product(hidden: Tensor, head: Tensor, *, into: Tensor) -> Tensor:
    """hidden @ head.T in `into`, which may be wider than the product."""
    return torch.mm(hidden, head.T, out=into) if into.dtype == hidden.dtype else into.copy_(hidden @ head.T)


def _chunks(count: int, head: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the tokens, each with two matrices (chunk, V) to compute in: fresh ones cost page faults."""
    size = min(count, CHUNK.get(head.device.type, CHUNK["cpu"]))
    buffers = torch.empty(2, size, len(head), dtype=torch.float32, device=head.device)
    for start in range(0, count, size or 1):
        rows = slice(start, min(start + size, count))
        yield rows, *buffers[:, : rows.stop - start]


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
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it, and its type loses `self`
    return Policy(model.eval(), compute=compute, temperature=temperature)


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
