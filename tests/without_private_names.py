# SPDX-License-Identifier: Apache-2.0
"""A training step where torch and Transformers have none of the private names:

`python tests/without_private_names.py backend...`.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def remove(names: Any, gone: Callable[[str], bool], setattr: Callable[[Any, str, Any], None]) -> None:
    """Make private names missing, for modules that are imported from now on."""
    look_up, word = names.look_up, names.word
    setattr(names, "look_up", lambda self, path, *given: look_up(self, f"gone.{path}" if gone(path) else path, *given))
    setattr(names, "word", lambda self, path, *given: word(self, f"{path}_gone" if gone(path) else path, *given))


def remove_all() -> None:
    """Load liger_core.private_names before liger_core, which looks all of them up."""
    (folder,) = importlib.util.find_spec("liger_core").submodule_search_locations  # type: ignore[union-attr, misc]
    spec: Any = importlib.util.spec_from_file_location("liger_core.private_names", Path(folder) / "private_names.py")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    remove(module.PrivateNames, lambda path: True, setattr)


def main(*backends: str) -> None:
    remove_all()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import liger_core
    import liger_hf
    import liger_triton  # noqa: F401
    from liger_core.private_torch import dispatch_stack_length

    assert dispatch_stack_length() == 1, "torch's own function was found"
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    ids = torch.randint(37, (2, 7))

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]

    expected = step()
    report = liger_hf.apply(model)
    assert {"rms_norm", "swiglu"} <= {row.op for row in report.rows if row.verdict == "replaced"}, report
    for backend in backends:
        with liger_core.use(backend):
            for one, other in zip(step(), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        print(backend, "right")


if __name__ == "__main__":
    main(*sys.argv[1:])
