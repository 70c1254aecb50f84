"""The agent's weights: tokens in, log-probabilities out."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prompt_r1.model.attention import Row
from prompt_r1.model.distributed import full_tensor, shard
from prompt_r1.model.packing import Packed

# Tokens whose logits are computed at a time: few enough for a CPU's cache, many enough to fill a GPU.
CHUNK_TOKENS = {"cpu": 128, "cuda": 1024}
# Rows of x, and least entries of W, with which MKL computes (W @ x.T).T up to 2.6 times as fast as x @ W.T.
FEW_ROWS = range(4, 49 if torch.backends.mkl.is_available() else 4)
LARGE_MATRIX = 2**18


class TokenScores(NamedTuple):
    """Scores of the N agent tokens of a packed row.

    A tuple, because FSDP2 finds no tensors in dataclasses.
    """

    logprobs: Tensor  # (N,) float32 nats of each token given all before
    entropy: Tensor  # (N,) nats of the distribution at each token, without gradient


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model."""
    layers = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList)]
    return next(part for part in lists if len(part) == layers)


class Policy(nn.Module):
    """A causal language model that returns log-probabilities, computed in chunks of tokens.

    The logits of a whole row, [tokens × vocabulary], never exist.
    """

    def __init__(self, model: PreTrainedModel, *, compute: torch.dtype, temperature: float = 1.0) -> None:
        """`compute` is the dtype of matrix products. The weights keep their own dtype: float32 for weights
        that are trained, because bfloat16 rounds a step of 1e-6 away.
        """
        super().__init__()
        self.model = model
        self.device = model.device  # of the computation; sharded weights may be elsewhere
        self.compute = compute
        self.temperature = temperature  # logits are divided by it, so we train the distribution we sample
        if self.device.type == "cpu" and compute == torch.float32:
            for layer in model.modules():
                if type(layer) is nn.Linear and layer.weight.numel() >= LARGE_MATRIX:
                    layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
        text = model.config.get_text_config()
        # Logits are scale · product (Cohere, Granite), then cap · tanh(logits / cap) (nanochat).
        scale, divisor = (getattr(text, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
        self.logit_scale = scale / divisor
        self.logit_cap: float = getattr(text, "final_logit_softcapping", None) or 0.0

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text, by the model's generation config; some models have several."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(token for token in listed if type(token) is int)  # the file may hold anything

    def trained_parameters(self) -> list[nn.Parameter]:
        """The weights that learn: all of them, or only the adapters (lora.py)."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def forward(self, packed: Packed) -> TokenScores:
        """Score the agent's tokens in a packed row."""
        hidden = self.hidden_states(packed)
        weight = self.model.get_output_embeddings().weight  # (V, hidden)
        rows = hidden.index_select(0, packed.sources).to(self.compute)  # (N, hidden)
        scale, cap = self.logit_scale / self.temperature, self.logit_cap / self.temperature
        return TokenScores(*_ChunkedLogprobs.apply(rows, weight, packed.targets, scale, cap))

    def hidden_states(self, row: Row) -> Tensor:
        """Last hidden states (T, hidden) of a row of T tokens."""
        with torch.autocast(row.tokens.device.type, self.compute, enabled=self.compute.itemsize < 4):
            return self.model.base_model(
                input_ids=row.tokens[None],
                position_ids=row.positions[None],
                use_cache=False,
                attend_row=row.attend,
            ).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (R, V) in float32 from hidden states (R, hidden)."""
        head = self.model.get_output_embeddings().weight.to(self.compute)
        out = torch.empty(len(hidden), len(head), dtype=torch.float32, device=hidden.device)
        return _logits(hidden.to(self.compute), head, self.logit_scale, self.logit_cap, out=out)

    def checkpoint_activations(self) -> None:
        """Enable gradient checkpointing: keep only each layer's input, and recompute the rest in backward."""
        # transformers' own switch acts in training mode only, in which models have dropout and noise.
        for block in blocks_of(self.model):
            block.forward = partial(_recomputed, block.forward)

    def shard(self, mesh: DeviceMesh, device: torch.device, *, offload: bool) -> None:
        """Shard every weight over the ranks. From then on every forward must be called by all ranks."""
        shard(self, blocks_of(self.model), mesh=mesh, compute=self.compute, offload=offload)
        self.device = device

    @torch.no_grad()
    def copy_weights_from(self, learner: "Policy") -> None:
        """Copy the weights of another policy, converted to this one's dtype.

        Sharded weights are gathered one at a time: no second full copy exists, and every rank must call this.
        """
        if learner is not self:
            for mine, new in zip(self.parameters(), learner.parameters(), strict=True):
                mine.copy_(full_tensor(new.to(mine.device, mine.dtype)))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The forward of a large linear layer on a CPU, (…, K) → contiguous (…, N), for SDPA's fast kernel."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) not in FEW_ROWS:
        return F.linear(x, layer.weight, layer.bias)
    out = (layer.weight @ rows.T.contiguous()).T.contiguous().view(*x.shape[:-1], -1)
    return out if layer.bias is None else out + layer.bias


def _recomputed(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """A layer's forward that is computed again in backward. Nothing in it is random."""
    if not torch.is_grad_enabled():  # `checkpoint` would do the same, but takes 0.3 ms to find out
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **keywords)


class _ChunkedLogprobs(torch.autograd.Function):
    """log_softmax(logits)[target], and the entropy, chunk by chunk. `_logits` explains `scale` and `cap`.

    The logits of a chunk are dropped at once and recomputed in backward. This costs one more product with the
    head, and saves memory that would grow with tokens × vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, cap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.scale, ctx.cap = scale, cap
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        head = weight.to(hidden.dtype)
        for rows, (logits, log_p) in _chunks(len(targets), head):
            torch.log_softmax(_logits(hidden[rows], head, scale, cap, out=logits), -1, out=log_p)
            logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -torch.exp(log_p, out=logits).mul_(log_p).sum(1)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        grad = ctx.scale * grad
        grad_hidden = torch.empty_like(hidden)
        grad_head = None
        if ctx.needs_input_grad[1]:  # not beside adapters, where the head is frozen
            scaled = grad[:, None].to(hidden.dtype) * hidden
            # float32: a sum over many chunks loses bits in bfloat16.
            grad_head = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        head = weight.to(hidden.dtype)
        for rows, (logits, p) in _chunks(len(targets), head):
            torch.softmax(_logits(hidden[rows], head, ctx.scale, ctx.cap, out=logits), -1, out=p)
            # d log p[target] / d logits = one-hot - p. We compute p - one-hot, in float32 before rounding.
            p[torch.arange(len(p), device=p.device), targets[rows]] -= 1
            if ctx.cap:  # d cap · tanh(x / cap) / dx = 1 - tanh²
                p *= 1 - (logits / ctx.cap).square_()
            slope = p.to(hidden.dtype)
            grad_hidden[rows] = (slope @ head).mul_(-grad[rows, None])
            if grad_head is not None and grad_head.dtype == hidden.dtype:  # no second matrix of its size
                grad_head.addmm_(slope.T, scaled[rows], alpha=-1)
            elif grad_head is not None:
                grad_head -= slope.T @ scaled[rows]
            del slope  # before the next chunk allocates its own
        return grad_hidden, None if grad_head is None else grad_head.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, head: Tensor, scale: float, cap: float, *, out: Tensor) -> Tensor:
    """Write scale · hidden @ head.T to the float32 `out` (R, V); with a cap, cap · tanh(that / cap).

    Not to bfloat16: there logits of 8 to 16 are off by up to 0.03.
    """
    if hidden.dtype.itemsize > out.dtype.itemsize:  # float64, in tests
        out.copy_(hidden @ head.T)
    elif hidden.device.type == "cpu" and len(hidden) in FEW_ROWS and head.numel() >= LARGE_MATRIX:
        out.copy_((head.to(out.dtype) @ hidden.to(out.dtype).T.contiguous()).T)
    elif hidden.dtype == out.dtype or hidden.device.type == "cpu":  # a CPU has no product of two dtypes
        torch.mm(hidden.to(out.dtype), head.to(out.dtype).T, out=out)
    else:
        torch.mm(hidden, head.T, out_dtype=out.dtype, out=out)
    if scale != 1:
        out.mul_(scale)
    return out.div_(cap).tanh_().mul_(cap) if cap else out


def _chunks(count: int, head: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Divide `count` tokens into chunks of R rows, each with two float32 buffers (2, R, V) to compute in.

    All chunks share these buffers: fresh memory costs page faults.
    """
    size = max(1, min(count, CHUNK_TOKENS[head.device.type]))
    buffers = torch.empty(2, size, len(head), dtype=torch.float32, device=head.device)
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        yield rows, buffers[:, : rows.stop - start]
