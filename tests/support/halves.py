"""A quantisation plug-in of the library that stores weights in float16, at half their value."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "halves"
lacks_kernel = False
"""Whether the plug-in's layers report that they cannot run on this machine."""


class HalvedLinear(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if lacks_kernel:
            raise RuntimeError("no kernel for halves on this device")
        return nn.functional.linear(rows, 2 * self.weight.to(rows.dtype))


@register_quantization_config(METHOD)
class HalvesConfig(QuantizationConfigMixin):
    def __init__(self, **_: Any) -> None:
        self.quant_method = METHOD


@register_quantizer(METHOD)
class HalvesQuantizer(HfQuantizer):
    requires_calibration = False
    is_trainable = False

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and name != "lm_head":
                    halved = HalvedLinear(
                        child.in_features,
                        child.out_features,
                        bias=False,
                        device="meta",
                        dtype=torch.float16,
                    )
                    setattr(parent, name, halved)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        pass


def halve(directory: Path, method: str = METHOD) -> None:
    """Quantises a checkpoint in place."""
    path = directory / "model.safetensors"
    tensors = {
        name: (tensor / 2).to(torch.float16) if "_proj" in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (directory / "config.json").write_text(json.dumps(config))
