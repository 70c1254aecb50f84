"""The agent's weights: tokens in, log-probabilities out."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prompt_r1.model.attention import Row, RowAttention
from prompt_r1.model.packing import Packed
from prompt_r1.model.sharding import full_tensor, shard

# The number of tokens whose logits are computed at a time. The logits of 128 tokens fit into a CPU's cache,
# and the logits of 1,024 keep a GPU busy.
CHUNK_TOKENS = {"cpu": 128, "cuda": 1024}


class PolicyOutput(NamedTuple):
    """What the policy says about the N agent tokens of a packed row.

    This is a tuple, because FSDP2 puts backward hooks on the tensors of an output, and does not look for them
    inside a dataclass.
    """

    logprobs: Tensor  # (N,) float32: the log-probability of each token, given all tokens before it, in nats
    entropy: Tensor  # (N,) the entropy of the distribution behind each token, in nats, without gradient


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer layers of a model: its first list of modules that is as long as its config says."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList)]
    return next(part for part in lists if len(part) == count)


class Policy(nn.Module):
    """A causal language model that returns log-probabilities, computed in chunks of tokens.

    So the logits of a whole row, (tokens, vocabulary), never exist.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype,
        temperature: float = 1.0,
        vocabulary: int = 0,
    ) -> None:
        """`compute_dtype` is the dtype of matrix products. The weights keep their own dtype. Trained weights
        need float32, because bfloat16 rounds a step of 1e-6 away.

        `vocabulary` is the number of tokens of the tokenizer; 0: as many as the head has rows. Heads are
        often padded. Rows beyond the tokenizer's tokens have no logits, so they are neither sampled nor
        scored.
        """
        super().__init__()
        text = model.config.get_text_config()
        self.model = model
        self.device = model.device  # The model computes here. Sharded weights may be elsewhere.
        self.compute_dtype = compute_dtype
        self.temperature = temperature  # `forward` divides logits by it. So we train what we sample from.
        self.vocabulary = vocabulary or text.vocab_size
        multiplier = getattr(text, "logit_scale", None) or 1.0  # Cohere's models have this factor.
        divisor = getattr(text, "logits_scaling", None) or 1.0  # Granite's models have this divisor.
        self.logit_scale = multiplier / divisor

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text, by the model's generation config. Some models have several."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(token for token in listed if type(token) is int)  # The file may hold anything.

    def trained_parameters(self) -> list[nn.Parameter]:
        """The weights that learn: all weights, or only the adapters (lora.py)."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def forward(self, packed: Packed) -> PolicyOutput:
        """Score the agent's tokens in a packed row."""
        hidden = self.hidden_states(packed)
        head = self.model.get_output_embeddings().weight  # (rows, hidden)
        scored = hidden.index_select(0, packed.sources).to(self.compute_dtype)  # (N, hidden)
        scale = self.logit_scale / self.temperature
        logprobs, entropy = _ChunkedLogprobs.apply(scored, head, packed.targets, scale, self.vocabulary)
        return PolicyOutput(logprobs, entropy)

    def hidden_states(self, row: Row) -> Tensor:
        """Last hidden states (T, hidden) of a row of T tokens."""
        return self.run(self.model.base_model, row, row.row_attention())

    def run(self, model: Callable[..., Any], row: Row, attention: RowAttention) -> Tensor:
        """Last hidden states (T, hidden) of a row, from the base model or from a compiled form of it."""
        with self.autocast():
            out = model(
                input_ids=row.tokens[None],
                position_ids=row.positions[None],
                use_cache=False,
                row_attention=attention,
            )
        return out.last_hidden_state[0]

    def autocast(self) -> torch.autocast:
        """A context in which matrix products are computed in `compute_dtype`, if it has 16 bits."""
        return torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype.itemsize < 4)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (R, V) in float32 from hidden states (R, hidden).

        They are not divided by `temperature`: the engine divides them by the temperature of each call.
        """
        head = self.model.get_output_embeddings().weight[: self.vocabulary]
        return _logits(hidden.to(self.compute_dtype), head.to(self.compute_dtype), self.logit_scale)

    def checkpoint_activations(self) -> None:
        """Enable gradient checkpointing: keep only each layer's input, and recompute the rest in backward."""
        # HF's gradient_checkpointing_enable() works only in train() mode. We stay in eval(), so that dropout
        # is off.
        for layer in layers_of(self.model):
            layer.forward = partial(_recomputed, layer.forward)

    def shard(self, mesh: DeviceMesh, device: torch.device, *, offload: bool) -> None:
        """Shard every weight over the ranks. From then on every forward must be called by all ranks."""
        shard(self, layers_of(self.model), mesh=mesh, compute_dtype=self.compute_dtype, offload=offload)
        self.device = device

    @torch.no_grad()
    def copy_weights_from(self, learner: "Policy") -> None:
        """Copy the weights of another policy, converted to the dtype of this policy.

        Sharded weights are gathered one at a time, so no second full copy exists. Called by every rank.
        """
        if learner is self:
            return
        for mine, new in zip(self.parameters(), learner.parameters(), strict=True):
            # Move and convert a shard before it is gathered. So an offloaded shard is gathered on the GPU and
            # no more bytes are sent than needed. Copy in place: the engine's CUDA graphs read this tensor.
            converted = new.to(mine.device, mine.dtype)
            mine.copy_(full_tensor(converted))


def _recomputed(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Run a layer's forward, which is computed again in backward. Nothing in a forward is random."""
    if not torch.is_grad_enabled():  # `checkpoint` would do the same, but takes 0.3 ms for the decision.
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **keywords)


def _logits(hidden: Tensor, head: Tensor, scale: float) -> Tensor:
    """scale · hidden @ head.T, (R, K) and (V, K) → (R, V).

    Inputs of 16 bits give logits in float32. In bfloat16, logits of 8 to 16 would be off by up to 0.03.
    """
    if hidden.dtype.itemsize > 2:
        logits = hidden @ head.T
    elif hidden.is_cuda:
        logits = torch.mm(hidden, head.T, out_dtype=torch.float32)
    else:  # On a CPU, torch.mm cannot return another dtype.
        logits = hidden.float() @ head.float().T
    return logits if scale == 1 else logits.mul_(scale)


def _score(hidden: Tensor, head: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """log_softmax(scale · hidden @ head.T)[targets] of R tokens, and the entropies, (R,) each."""
    log_p = torch.log_softmax(_logits(hidden, head, scale), -1)
    entropy = -log_p.exp().mul_(log_p).sum(1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def _slope(hidden: Tensor, head: Tensor, targets: Tensor, scale: float) -> Tensor:
    """softmax(scale · hidden @ head.T) minus the one-hot targets, (R, V) in the dtype of `hidden`.

    This is -d log p[target] / d logits. It is computed in float32, and then rounded.
    """
    p = torch.softmax(_logits(hidden, head, scale), -1)
    p[torch.arange(len(p), device=p.device), targets] -= 1
    return p.to(hidden.dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    """`_score` of all tokens, chunk by chunk. The entropy has no gradient.

    The logits of a chunk are dropped at once, and recomputed in backward. benchmarks/README.md compares this
    with two functions of torch, `checkpoint` and `linear_cross_entropy`: they are slower or less precise.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.scale, ctx.vocabulary = scale, vocabulary
        head = weight[:vocabulary].to(hidden.dtype)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(hidden):
            logprobs[rows], entropy[rows] = _score(hidden[rows], head, targets[rows], scale)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        head = weight[: ctx.vocabulary].to(hidden.dtype)
        # The logits are scale · z with z = hidden @ head.T, so d loss / d z = -scaled_grad · slope. The chain
        # rule then gives
        #     grad_hidden = -scaled_grad · slope @ head
        #     grad_head   = -slope.T @ (scaled_grad · hidden)
        scaled_grad = ctx.scale * grad
        grad_hidden = torch.empty_like(hidden)
        # `grad_weight` stays None if the head is frozen, as it is beside adapters.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            scaled_hidden = scaled_grad[:, None].to(hidden.dtype) * hidden
            # At least float32, because a sum over many chunks loses bits in bfloat16.
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            grad_head = grad_weight[: ctx.vocabulary]  # a view: its rows of the tokenizer's tokens
        for rows in _chunks(hidden):
            slope = _slope(hidden[rows], head, targets[rows], ctx.scale)
            grad_hidden[rows] = (slope @ head).mul_(-scaled_grad[rows, None])
            if grad_weight is not None:
                _subtract_product(grad_head, slope.T, scaled_hidden[rows])
            del slope  # Its memory is free before the next chunk needs as much.
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        # Targets, scale and vocabulary have no gradient.
        return grad_hidden, grad_weight, None, None, None


def _subtract_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total -= left @ right."""
    if total.dtype == left.dtype:
        # This writes no second matrix as large as `total`, and takes half the time of the other branch.
        total.addmm_(left, right, alpha=-1)
    else:  # addmm_ takes only equal dtypes.
        total -= left @ right


def _chunks(hidden: Tensor) -> Iterator[slice]:
    """Yield the rows of a tensor in chunks of CHUNK_TOKENS."""
    size = CHUNK_TOKENS[hidden.device.type]
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)
