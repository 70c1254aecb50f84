"""Fused RMSNorm, rotary embedding and SwiGLU for unmodified models.

In transformers, a layer of Qwen3 launches 44 kernels for its four norms, its rotary embedding and its gate,
and a decode step spends as long in them as it takes to read the weights (calculated). Here it launches 7: a
norm is one kernel of `torch.nn.functional.rms_norm`, and torch.compile writes the kernels of the rotary
embedding (2) and of the gate (1).

Only the `forward` of single modules is replaced, and only where values and gradients agree with the module's
own on random data; all other modules stay as they are. Off on CPUs, where results stay bit for bit what they
were. On a GPU: not measured.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from prompt_r1.errors import first_line

ROTARY = "apply_rotary_pos_emb"  # what transformers calls the function, in the file of each family
ROWS = 6  # tokens of the random data
# Largest relative difference in norm, by the bytes of a number.
TOLERANCE = {4: 1e-4, 2: 2e-2}

Function = Callable[..., Any]


def fuse(
    model: PreTrainedModel,
    device: torch.device,
    compute: torch.dtype,
    *,
    compiler: Callable[[Function], Function] = torch.compile,
) -> tuple[str, ...]:
    """Replace the `forward` of modules by fused ones, and return the names of their classes.

    `device` and `compute` are those of the computation; the weights may be elsewhere. A compiler that does
    not work is reported by a warning.
    """
    fused: dict[tuple[type, int], Function | None] = {}  # the `forward` for each class and size
    for module in model.modules():
        kind = type(module), _width(module)
        if kind not in fused:
            forward = _fused_forward(module, compiler)
            agrees = forward is not None and _agrees(forward, module, device, compute)
            fused[kind] = forward if agrees else None
        if (forward := fused[kind]) is not None:
            # On the instance: other models of this class are not touched. A method, so that copies of the
            # module compute with their own weights.
            module.forward = MethodType(forward, module)
    return tuple(sorted({kind.__name__ for (kind, _), forward in fused.items() if forward is not None}))


@contextmanager
def own_forwards(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute everything with the `forward` of its classes."""
    fused = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    try:
        yield
    finally:
        for module, forward in fused.items():
            module.forward = forward


def _width(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) and weight.dim() == 1 else 0


def _fused_forward(module: nn.Module, compiler: Callable[[Function], Function]) -> Function | None:
    """What may replace the `forward` of a norm, a gate, or an attention with rotary embeddings."""
    own = type(module).forward
    if _width(module) and hasattr(module, "variance_epsilon"):
        return _rms_norm
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return _swiglu_of(compiler(_copy_of(_silu_product)))
    if isinstance(own, FunctionType) and ROTARY in own.__code__.co_names and hasattr(module, "head_dim"):
        rotary = own.__globals__[ROTARY]
        compiled = compiler(_copy_of(rotary) if isinstance(rotary, FunctionType) else rotary)
        return _copy_of(own, **{ROTARY: compiled})
    return None


def _random(*size: int) -> Tensor:
    """Random numbers on the CPU that leave torch's random state as it is."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _agrees(forward: Function, module: nn.Module, device: torch.device, compute: torch.dtype) -> bool:
    """Whether values and gradients are those of the module's own `forward`, on a copy and random rows."""
    probe = copy.deepcopy(module).to(device)
    weights = [weight for weight in probe.parameters() if weight.dim() == 1]
    with torch.no_grad():
        for weight in weights:  # it may be all ones, which would hide a difference
            weight.copy_(_random(*weight.shape))
    width = next((part.in_features for part in probe.modules() if isinstance(part, nn.Linear)), _width(probe))
    cos_sin = _random(2, 1, ROWS, getattr(probe, "head_dim", 0)).to(device)

    def results(function: Function, dtype: torch.dtype) -> list[Tensor]:
        """The output for rows (1, T, width), and the gradients at the rows and the weights."""
        rows = _random(1, ROWS, width).to(device, dtype).requires_grad_()
        more = {}
        if hasattr(probe, "head_dim"):
            more = {"position_embeddings": tuple(cos_sin.to(dtype)), "attention_mask": None}
        out = function(probe, rows, **more)
        out = out[0] if isinstance(out, tuple) else out
        direction = torch.cos(torch.arange(out.numel(), device=device)).view_as(out).to(out)
        return [out.detach(), *torch.autograd.grad(out, [rows, *weights], direction)]

    # Weights in float32 make float32 of some products in bfloat16.
    for dtype in {compute, *(weight.dtype for weight in probe.parameters())}:
        with torch.autocast(device.type, compute, enabled=compute.itemsize < 4):
            try:
                expected = results(type(module).forward, dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a family that computes something else
                return False
            try:
                found = results(forward, dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of a compiler: a missing C compiler, driver or header
                warnings.warn(
                    f"kernels are not fused, because they cannot be compiled: {first_line(error)}",
                    stacklevel=2,
                )
                return False
        limit = TOLERANCE[min(dtype.itemsize, *(part.element_size() for part in expected))]
        if not all(_close(*pair, limit) for pair in zip(found, expected, strict=True)):
            return False
    return True


def _close(found: Tensor, expected: Tensor, limit: float) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return float((found.double() - expected.double()).norm() / expected.double().norm()) <= limit


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """weight · x / sqrt(mean(x²) + ε). Rounded once; transformers rounds before the product as well."""
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    # Autocast would return float32.
    with torch.autocast(hidden_states.device.type, enabled=False):
        weight = self.weight.to(dtype)
        return F.rms_norm(hidden_states.to(dtype), weight.shape, weight, self.variance_epsilon)


def _silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_of(product: Function) -> Function:
    def swiglu(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))

    return swiglu


def _copy_of(function: Any, **names: object) -> Function:
    """The same function, for which some global names have other values.

    It has a code object of its own: torch.compile keeps at most eight variants of one, and each model, dtype
    and kind of batch needs some.
    """
    code, scope = function.__code__.replace(), {**function.__globals__, **names}
    other = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    other.__kwdefaults__ = function.__kwdefaults__
    return other
