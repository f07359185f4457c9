"""Functions that stay one operator of a compiled graph, however long the text is.

`torch.compile` and its backends unroll loops: the graph of a scan has a part per chunk of the text, and every other
length is another graph. A function that is called through `call` is one operator instead. The tracer asks for the
shapes of its results alone; when the graph runs, the function runs as it would without a graph, with loops and sizes
that depend on the values of tensors, and autograd differentiates it.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

# what a function gets: its tensors by name, numbers that may differ from call to call, and a description of the rest
Arguments = tuple[dict[str, torch.Tensor], Sequence[int], str]
# every copy of this code has its own operators
_SPACE = re.sub(r"\W", "_", __name__)


class Opaque(NamedTuple):
    """A function of `Arguments`, which returns tensors that share no memory with its arguments or one another."""

    run: Callable[..., list[torch.Tensor]]
    # the same arguments; tensors with the shapes and dtypes of the results
    shapes: Callable[..., list[torch.Tensor]]


_FUNCTIONS: dict[str, Opaque] = {}


def register(name: str, run: Callable, shapes: Callable) -> None:
    """Give a function the name by which graphs know it."""
    _FUNCTIONS[name] = Opaque(run, shapes)


def call(name: str, tensors: dict[str, torch.Tensor | None], sizes: list[int], options: str) -> list[torch.Tensor]:
    """The results of the function of that name; tensors that are `None` are left out."""
    given = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    has_gradients = torch.is_grad_enabled()
    needs = [has_gradients and tensor.requires_grad for tensor in given.values()]
    return _run(name, list(given.values()), ",".join(given), sizes, options, needs)[:-1]


def named_tuple(kind: type[tuple], tensors: dict[str, torch.Tensor]) -> tuple | None:
    """The NamedTuple whose fields are among the tensors, or `None`."""
    return kind(*(tensors[name] for name in kind._fields)) if kind._fields[0] in tensors else None


@contextmanager
def _recording(records: bool):
    """Autograd inside of an operator, where torch leaves it out."""
    with ExitStack() as stack:
        for key in ("AutogradFunctionality", "ADInplaceOrView"):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, key), False))
        stack.enter_context(torch.set_grad_enabled(records))
        yield


def _record(name, tensors, names, sizes, options, needs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that need a gradient, and the results, with autograd's graph between the two."""
    with _recording(any(needs)), torch.autocast(tensors[0].device.type, enabled=False):
        given = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True)]
        results = _FUNCTIONS[name].run(dict(zip(names.split(","), given, strict=True)), sizes, options)
    return [tensor for tensor in given if tensor.requires_grad], results


# An operator of any name that `torch.compile` splits CUDA graphs at, since it reads sizes from the device.
@torch.library.custom_op(f"{_SPACE}::run", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _run(
    name: str,
    tensors: Sequence[torch.Tensor],
    names: str,
    sizes: Sequence[int],
    options: str,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    """The results, and an empty tensor that carries autograd's graph to the backward pass."""
    given, results = _record(name, tensors, names, sizes, options, needs)
    carrier = tensors[0].new_empty(0)
    if given:
        carrier.recorded = given, results
    return [*(result.detach().contiguous() for result in results), carrier]


@_run.register_fake
def _(name, tensors, names, sizes, options, needs):
    results = _FUNCTIONS[name].shapes(dict(zip(names.split(","), tensors, strict=True)), sizes, options)
    # made anew, since a tensor that stands twice in the list would be one result to the graph
    return [*(result.new_empty(result.shape) for result in results), tensors[0].new_empty(0)]


@torch.library.custom_op(f"{_SPACE}::differentiate", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _differentiate(
    name: str,
    tensors: Sequence[torch.Tensor],
    names: str,
    sizes: Sequence[int],
    options: str,
    needs: Sequence[bool],
    carrier: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Gradients of the tensors that need one."""
    # A second backward pass, or a backend that made another tensor of the carrier, runs the function again.
    recorded = carrier.__dict__.pop("recorded", None)
    given, results = recorded or _record(name, tensors, names, sizes, options, needs)
    # a result may depend on none of the tensors that need one
    pairs = zip(results, gradients, strict=True)
    known = {result: gradient for result, gradient in pairs if gradient is not None and result.requires_grad}
    with _recording(True):
        found = torch.autograd.grad([*known], given, [*known.values()], allow_unused=True, materialize_grads=True)
    return [gradient.contiguous() for gradient in found]


@_differentiate.register_fake
def _(name, tensors, names, sizes, options, needs, carrier, gradients):
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(tensors, needs, strict=True) if need]


def _keep(ctx, inputs, output) -> None:
    name, tensors, *ctx.about = inputs
    ctx.name = name
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[-1])


def _backward(ctx, gradients):
    *tensors, carrier = ctx.saved_tensors
    needs = ctx.about[-1]
    found = iter(_differentiate(ctx.name, tensors, *ctx.about, carrier, list(gradients[:-1])))
    # torch takes an empty list of numbers for one of tensors
    sizes = None if ctx.about[1] else []
    return None, [next(found) if need else None for need in needs], None, sizes, None, None


_run.register_autograd(_backward, setup_context=_keep)
