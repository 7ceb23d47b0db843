"""A dictionary of bounded size."""

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Key, Value]):
    """A dictionary that keeps only the `num_max` entries that were set last."""

    def __init__(self, num_max: int) -> None:
        super().__init__()
        self._num_max = num_max

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._num_max:
            self.popitem(last=False)
