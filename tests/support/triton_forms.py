"""Lists the specialisations in which Triton would compile the attention kernels, without a device:
steps of an engine show the arguments that the compiler would get."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from outrider.engine.cuda.table_steps import DeviceBackend, TableSteps, attend_tables
from outrider.interfaces.engine import SequenceStep
from outrider.models import compatibility
from tests.support.models import tiny_config, tiny_module
from tests.support.paged_engines import EngineMaker

_COMPILER = make_backend(GPUTarget("cuda", 90, 32))
_forms: set[str] = set()


def _note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    bind = create_function_from_signature(self.signature, self.params, _COMPILER)
    _, form, options = bind(*args, **kwargs)
    _forms.add(f"{self.__name__} {form} {options}")


def main() -> None:
    """Prints the specialisations that steps need but the trial did not compile."""
    JITFunction.run = _note
    compatibility.check_answers = lambda *_: None
    config = tiny_config("llama")
    config.head_dim = 16  # Multiples share a specialisation, and models in use have multiples.
    engine = EngineMaker()(tiny_module(config), backend=DeviceBackend(attend_tables, 64))
    tried = set(_forms)
    assert tried, "the trial runs no kernel"
    assert isinstance(engine._steps, TableSteps), "the trial removes the kernels"
    for num in (1, 2, 3, 7, 16, 17):
        engine.forward([SequenceStep(f"{num}", tuple(range(num)), 1)])
        engine.forward([SequenceStep(f"{num}", (1,), 1), SequenceStep(f"beside {num}", (1, 2), 2)])
    for form in sorted(_forms - tried):
        print(form)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
