"""What a decode step costs the host, as counts: copies that wait for the device, and Python calls."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prompt_r1.agent import decode_kernels
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy
from tests.support import tiny


class WaitingCopies(TorchDispatchMode):
    """Counts the operations that use tensors of host and device (meta) without `non_blocking`."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode, composite operations arrive whole
            parts = operation.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.ndim}
        if "device" in kwargs and tensors:
            devices.add(torch.device(kwargs["device"]).type)
        name = operation.overloadpacket.__name__
        reads_scalar = name == "_local_scalar_dense" and tensors[0].is_meta
        self.count += reads_scalar or (len(devices) == 2 and not kwargs.get("non_blocking"))
        if reads_scalar:
            return 0
        if name == "_to_copy" and tensors[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        return operation(*args, **kwargs)


class WaitingUploads(TorchFunctionMode):
    """Counts `torch.tensor(…, device=…)`, of which the dispatcher sees no copy."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.tensor and str((kwargs or {}).get("device")) == "meta"
        return function(*args, **(kwargs or {}))


def test_a_decode_step_waits_for_the_device_once(monkeypatch):
    """When its tokens are copied to the host. Fifteen games of three questions, which share their rows."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # has no meta device
    monkeypatch.setattr(Policy, "attention", SimpleNamespace(decode=decode_kernels.flash, shares_rows=False))
    policy = Policy(tiny.model().to("meta", torch.bfloat16), compute=torch.bfloat16)
    engine = Engine(
        policy,
        stop_ids=frozenset(),
        max_tokens=64,
        kv_tokens=1000,
        prefill_tokens=512,
        record=lambda step: step,
        share_prompts=True,
    )
    copies, uploads = WaitingCopies(), WaitingUploads()
    counts: list[int] = []

    def watch(_: int) -> None:
        counts.append(copies.count + uploads.count)

    async def play() -> None:
        prompts = [[number // 5, number // 5 + 1] for number in range(15)]
        watches = [watch, *[None] * 14]
        calls = (
            engine.generate(prompt, max_new=6, seed=str(number), watch=watches[number])
            for number, prompt in enumerate(prompts)
        )
        await asyncio.gather(*calls)

    with copies, uploads:
        asyncio.run(play())
        torch.zeros(3, device="meta")[[0, 1]].tolist()  # two copies
        torch.tensor([1, 2], device="meta")
    assert counts[-4:] == [counts[-4] + step for step in range(4)]
    assert copies.count + uploads.count == counts[-1] + 3
