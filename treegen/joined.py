"""Linear layers of one input as one matrix product: queries, keys and values; gate and up.

A stock layer computes them one after another. With few rows, or few outputs, each product leaves
part of a GPU idle, and each is a launch; see docs/performance.md for what that costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# T tokens, I inputs, O outputs of all parts


class JoinedLinears:
    """The linear layers of a model that take the same input, replaced until `undo`.

    Numbers are the same but for rounding, whatever order the layers are called in.
    """

    def __init__(self, module: nn.Module, run: Callable[[], object]) -> None:
        """run: a forward pass, which shows what takes which input."""
        self._replaced: list[tuple[nn.Module, str, nn.Linear]] = []
        for parent, names in _siblings(module, run):
            parts = [getattr(parent, name) for name in names]
            joint = _Joint(parts)
            for place, (name, part) in enumerate(zip(names, parts, strict=True)):
                setattr(parent, name, _Part(joint, place))
                self._replaced.append((parent, name, part))

    def undo(self) -> None:
        """Put the layers back; their weights stay where they were joined."""
        for parent, name, part in self._replaced:
            setattr(parent, name, part)
        self._replaced.clear()


class _Joint(nn.Module):
    """One product for several linear layers, made when the first is called."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        self.weight_OI = _joined([part.weight for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias_O = _joined(biases) if biases else None
        self._input_TI: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def forward(self, input_TI: Tensor, place: int) -> Tensor:
        """What the part at a place computes of an input [..., I]."""
        if place == 0:
            outputs = linear(input_TI, self.weight_OI, self.bias_O).split(self.sizes, -1)
            self._input_TI, self._outputs = input_TI, outputs
        if self._input_TI is not input_TI:
            return self._alone(input_TI, place)
        output = self._outputs[place]
        if place == len(self.sizes) - 1:
            self._input_TI, self._outputs = None, ()
        return output

    def _alone(self, input_TI: Tensor, place: int) -> Tensor:
        bias = None if self.bias_O is None else self.bias_O.split(self.sizes)[place]
        return linear(input_TI, self.weight_OI.split(self.sizes)[place], bias)


class _Part(nn.Module):
    """Stands where one of the linear layers was."""

    def __init__(self, joint: _Joint, place: int) -> None:
        super().__init__()
        self.joint, self.place = joint, place

    def forward(self, input_TI: Tensor) -> Tensor:
        output: Tensor = self.joint(input_TI, self.place)
        return output


@torch.no_grad()
def _joined(parts: Sequence[Tensor]) -> nn.Parameter:
    """Parameters one after another in new memory, which they are then views of."""
    joined = nn.Parameter(torch.cat([part.data for part in parts]), requires_grad=False)
    for part, data in zip(parts, joined.data.split([len(part) for part in parts]), strict=True):
        part.data = data
    return joined


def _siblings(module: nn.Module, run: Callable[[], object]) -> list[tuple[nn.Module, list[str]]]:
    """Names of linear layers that take the same input in a pass, by parent, in order of calls."""
    calls: list[tuple[nn.Module, Tensor]] = []
    plain = [part for part in module.modules() if type(part) is nn.Linear]
    hooks = [
        part.register_forward_pre_hook(lambda part, inputs: calls.append((part, inputs[0])))
        for part in plain
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(part for part, _ in calls)
    names = {child: (parent, name) for parent in module.modules()
             for name, child in parent.named_children()}  # fmt: skip
    groups: dict[tuple[object, ...], list[nn.Module]] = defaultdict(list)
    for part, inputs in calls:
        if times[part] == 1:
            parent, _ = names[part]
            key = parent, id(inputs), part.weight.dtype, part.bias is None
            groups[key].append(part)
    return [
        (names[parts[0]][0], [names[part][1] for part in parts])
        for parts in groups.values()
        if len(parts) > 1
    ]
