"""Fused RMSNorm, rotary embedding and SwiGLU, forward and backward, on unmodified models.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    replacements: dict[tuple[type, int], Function | None] = {}  # for each class and size
    for module in model.modules():
        kind = type(module), _width(module)
        if kind not in replacements:
            replacements[kind] = _replacement(module, device, compute, compiler)
        replacement = replacements[kind]
        if replacement is not None:
            # On the instance: other models of this class are not touched. A method, so that copies of the
            # module compute with their own weights.
            module.forward = MethodType(replacement, module)
    return tuple(sorted({kind.__name__ for (kind, _), found in replacements.items() if found is not None}))


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


def _replacement(
    module: nn.Module, device: torch.device, compute: torch.dtype, compiler: Callable[[Function], Function]
) -> Function | None:
    """The fused `forward` of modules like this one; None if there is none that agrees with its own."""
    down, own = getattr(module, "down_proj", None), type(module).forward
    gated = hasattr(module, "gate_proj") and hasattr(module, "up_proj") and hasattr(module, "act_fn")
    if _width(module) and hasattr(module, "variance_epsilon"):
        return _rms_norm if _agrees(_rms_norm, module, _width(module), device, compute) else None
    if gated and isinstance(down, nn.Linear):
        swiglu = _swiglu_of(compiler(_copy_of(_silu_product)))
        return swiglu if _agrees(swiglu, module, down.out_features, device, compute) else None
    if isinstance(own, FunctionType) and ROTARY in own.__code__.co_names and hasattr(module, "head_dim"):
        rotary = own.__globals__[ROTARY]
        fused = compiler(_copy_of(rotary) if isinstance(rotary, FunctionType) else rotary)
        heads = _random(4, 1, ROWS, 2, module.head_dim).to(device).transpose(2, 3)
        inputs = [*heads[:2], *heads[2:, :, 0]]  # queries and keys (1, 2, T, D), cosines and sines (1, T, D)
        if all(
            _same(fused, rotary, [part.to(dtype) for part in inputs]) for dtype in _dtypes(module, compute)
        ):
            return _copy_of(own, **{ROTARY: fused})
    return None


def _random(*size: Any) -> Tensor:
    """Random numbers on the CPU that leave torch's random state as it is."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _dtypes(module: nn.Module, compute: torch.dtype) -> set[torch.dtype]:
    """Of what may reach the module: weights in float32 make float32 of some products in bfloat16."""
    return {compute, *(weight.dtype for weight in module.parameters())}


def _agrees(
    forward: Function, module: nn.Module, width: int, device: torch.device, compute: torch.dtype
) -> bool:
    """Compare a `forward` with the module's own on random rows (1, T, width), on a copy of the module."""
    probe = copy.deepcopy(module).to(device)
    weights = [weight for weight in probe.parameters() if weight.dim() == 1]
    with torch.no_grad():
        for weight in weights:  # it may be all ones, which would hide a difference
            weight.copy_(_random(*weight.shape))
    functions = MethodType(forward, probe), MethodType(type(module).forward, probe)
    rows = _random(1, ROWS, width).to(device)
    with torch.autocast(device.type, compute, enabled=compute.itemsize < 4):
        return all(_same(*functions, [rows.to(dtype)], weights) for dtype in _dtypes(module, compute))


def _same(fused: Function, own: Function, inputs: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> bool:
    """Whether values, and gradients at the inputs and the weights, agree."""

    def results(function: Function) -> list[Tensor]:
        leaves = [given.detach().clone().requires_grad_() for given in inputs]
        weights_with_gradients = [weight.requires_grad_() for weight in weights]
        out = function(*leaves)
        values = list(out) if isinstance(out, tuple) else [out]
        directions = [torch.cos(torch.arange(v.numel(), device=v.device)).view_as(v).to(v) for v in values]
        gradients = torch.autograd.grad(values, [*leaves, *weights_with_gradients], directions)
        return [result.detach() for result in (*values, *gradients)]

    try:
        expected = results(own)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a family that computes something else
        return False
    try:
        found = results(fused)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler: a missing C compiler, driver or header
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"kernels are not fused, because they cannot be compiled: {first}", stacklevel=2)
        return False
    for a, b in zip(found, expected, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        difference = float((a.double() - b.double()).norm() / b.double().norm())
        if not difference <= TOLERANCE[min(part.element_size() for part in (*expected, *inputs))]:
            return False
    return True


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
