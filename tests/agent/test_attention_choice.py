"""The attention that a GPU uses is named, and a slow one is refused unless it is allowed."""

import pytest
import torch

from prompt_r1.agent import decode_kernels
from prompt_r1.agent.attention_choice import check_attention, warn_if_slow
from prompt_r1.errors import UsageError
from tests import tiny


def policy_on(device: str, dtype: torch.dtype):
    """A policy that says it computes there; its weights stay on the CPU."""
    policy = tiny.policy()
    policy.device, policy.compute = torch.device(device), dtype
    return policy


def test_a_gpu_without_flash_attention_is_refused_in_16_bits_unless_allowed():
    """A bug: a model fell back to 2,304 calls of SDPA in a step, and nothing said so."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    policy = policy_on("cuda", torch.bfloat16)
    with pytest.raises(
        UsageError, match=r"one_by_one in rollouts .*game_by_game in updates .*--slow-attention"
    ):
        check_attention(policy, allow_slow=False)
    line = check_attention(policy, allow_slow=True)
    assert "flash_package: No module named 'flash_attn'" in line or "flash_package: Torch not" in line
    assert "flash: " in line and "\n" not in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_agent_that_only_plays_warns_of_slow_attention(caplog):
    """A bug: infer, evaluate and serve fell back to it in silence."""
    for quick in (policy_on("cuda", torch.float32), policy_on("cpu", torch.bfloat16)):
        warn_if_slow(quick, "a")
    assert not caplog.records
    warn_if_slow(policy_on("cuda", torch.bfloat16), "my/agent")
    assert len(caplog.records) == 1
    assert "my/agent attends to one sequence after the other" in caplog.text and "flash: " in caplog.text


def test_in_32_bits_there_is_nothing_to_refuse():
    line = check_attention(policy_on("cuda", torch.float32), allow_slow=False)
    assert line.count("16 bits only") == 2


def test_a_cpu_uses_its_fastest_kernels():
    line = check_attention(tiny.policy(), allow_slow=False)
    assert "one_by_one in rollouts (FlashAttention needs a GPU), merged in updates" in line


def test_a_kernel_with_another_result_is_rejected_with_the_reason():
    def wrong(query, *_):
        return query

    def right(*arguments):
        return decode_kernels.one_by_one(*arguments)

    sizes = (torch.device("cpu"), torch.float32, 4, 2, 16)
    assert "close" in decode_kernels.rejection(wrong, *sizes, windows=True)
    assert decode_kernels.rejection(right, *sizes, windows=True) == ""
