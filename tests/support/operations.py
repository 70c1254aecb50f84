"""Record what torch computes."""

from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOperations(TorchDispatchMode):
    """Inside `with`, each operation that torch dispatches adds its name, such as "aten.mm.dtype"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        self.names.append(str(operation))
        return operation(*arguments, **(keywords or {}))
