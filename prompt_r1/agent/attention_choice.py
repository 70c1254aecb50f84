"""Which implementations of attention a GPU uses, and why; refuses slow ones that nobody allowed."""

import logging

from prompt_r1.agent import decode_kernels, packed_attention
from prompt_r1.agent.policy import Policy, attention_shape
from prompt_r1.errors import UsageError

logger = logging.getLogger(__name__)


def check_attention(policy: Policy, *, allow_slow: bool) -> str:
    """One line: the attention of rollouts and of updates, and why not a faster one.

    Raises UsageError if a GPU in 16 bits would compute sequence by sequence, unless `allow_slow`: a decode
    step of 64 games would launch 2,304 kernels for attention alone.
    """
    shape = attention_shape(policy.model.config)
    device, dtype = policy.device, policy.compute
    sizes = (device, dtype, shape.heads, shape.kv_heads, shape.dim)
    playing = policy.decode_kernel()
    learning = packed_attention.choose_attention(*sizes, windows=shape.windows)
    why_playing = _why_not_flash(policy, playing)
    why_learning = packed_attention.rejection(*sizes, windows=shape.windows)
    line = (
        f"attention: {playing.__name__} in rollouts{_in_brackets(why_playing)}, "
        f"{learning.__name__} in updates{_in_brackets(why_learning)}"
    )
    slow = playing is decode_kernels.one_by_one or learning is packed_attention.game_by_game
    if slow and _on_gpu_in_16_bits(policy) and not allow_slow:
        raise UsageError(f"{line}: this is slow on a GPU; use another torch, or give --slow-attention true")
    return line


def warn_if_slow(policy: Policy, name: str) -> None:
    """Say that a model which only generates does so without FlashAttention, and why."""
    kernel = policy.decode_kernel()
    if kernel is decode_kernels.one_by_one and _on_gpu_in_16_bits(policy):
        why = _why_not_flash(policy, kernel)
        logger.warning("%s attends to one sequence after the other, slowly for a GPU: %s", name, why)


def _on_gpu_in_16_bits(policy: Policy) -> bool:
    return policy.device.type == "cuda" and policy.compute.itemsize == 2


def _why_not_flash(policy: Policy, chosen: decode_kernels.Kernel) -> str:
    """Why each kernel before the chosen one was not chosen."""
    if policy.explicit_scores:
        return "the model has soft caps or sinks"
    if policy.device.type != "cuda":
        return "FlashAttention needs a GPU"
    if policy.compute.itemsize != 2:
        return "FlashAttention computes in 16 bits only"
    shape = attention_shape(policy.model.config)
    reasons = []
    for kernel in decode_kernels.RECORDABLE:
        if kernel is chosen:
            break
        reason = decode_kernels.rejection(
            kernel,
            policy.device,
            policy.compute,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            windows=shape.windows,
        )
        reasons.append(f"{kernel.__name__}: {reason}")
    return "; ".join(reasons)


def _in_brackets(reason: str) -> str:
    return f" ({reason})" if reason else ""
