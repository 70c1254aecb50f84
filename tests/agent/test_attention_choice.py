"""The attention that a GPU uses is named, and a slow one is reported."""

import re

import pytest
import torch

from prompt_r1.agent import decode_kernels
from prompt_r1.agent.attention import AttentionShape
from prompt_r1.agent.attention_choice import Place, describe_attention, warn_if_slow, why_not_decode
from tests.support import tiny


def policy_on(device: str, dtype: torch.dtype):
    """A policy that says it computes there; its weights stay on the CPU."""
    policy = tiny.policy()
    policy.device, policy.compute = torch.device(device), dtype
    return policy


def test_a_gpu_without_flash_attention_is_reported_as_slow_in_16_bits():
    """A bug: a model fell back to 2,304 calls of SDPA in a step, and nothing said so."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    line = describe_attention(policy_on("cuda", torch.bfloat16).attention)
    assert re.search("one_by_one in rollouts .*game_by_game in updates .*: this is slow on a GPU", line)
    # Without the package; with it, of a torch without CUDA, and of one without a GPU.
    reasons = ("No module named 'flash_attn'", "Torch not", "Found no NVIDIA driver")
    assert any(f"flash_package: {reason}" in line for reason in reasons)
    assert "flash: " in line and "\n" not in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_agent_that_only_plays_warns_of_slow_attention(caplog):
    """A bug: infer, evaluate and serve fell back to it in silence."""
    for quick in (policy_on("cuda", torch.float32), policy_on("cpu", torch.bfloat16)):
        warn_if_slow(quick.attention, "a")
    assert not caplog.records
    warn_if_slow(policy_on("cuda", torch.bfloat16).attention, "my/agent")
    assert len(caplog.records) == 1
    assert "my/agent attends to one sequence after the other" in caplog.text and "flash: " in caplog.text


def test_in_32_bits_there_is_nothing_to_report():
    line = describe_attention(policy_on("cuda", torch.float32).attention)
    assert line.count("16 bits only") == 2 and "slow" not in line
    assert re.search("one_by_one in rollouts .*, game_by_game in updates", line)


def test_a_cpu_uses_its_fastest_kernels():
    for dtype in (torch.float32, torch.bfloat16):
        line = describe_attention(policy_on("cpu", dtype).attention)
        assert "one_by_one in rollouts (FlashAttention needs a GPU), merged in updates" in line


def test_a_kernel_with_another_result_is_rejected_with_the_reason():
    def wrong(query, *_):
        return query

    def right(*arguments):
        return decode_kernels.one_by_one(*arguments)

    place = Place(AttentionShape(2, 4, 2, 16, windows=True), torch.device("cpu"), torch.float32)
    assert "close" in why_not_decode(wrong, place)
    assert why_not_decode(right, place) == ""
