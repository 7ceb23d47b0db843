"""Which processors multiply bfloat16 numbers with instructions of their own."""

import pytest
import torch

from outrider.kernels.processor import has_bfloat16

_NEITHER = {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("expected", "onednn", "capabilities"),
    [
        (True, True, _NEITHER | {"avx512_bf16": True}),
        (True, True, _NEITHER | {"amx_bf16": True}),
        # oneDNN "supports" bfloat16 on each processor with AVX-512, by emulation.
        (False, True, _NEITHER),
        # AVX2 alone, or a limit by ONEDNN_MAX_CPU_ISA.
        (False, False, _NEITHER),
        (False, False, _NEITHER | {"avx512_bf16": True}),
        (True, True, {"architecture": "aarch64"}),
        (False, False, {"architecture": "aarch64"}),
    ],
)
def test_a_processor_has_bfloat16_if_it_need_not_be_emulated(
    expected: bool, onednn: bool, capabilities: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert has_bfloat16() is expected


def test_a_torch_without_onednn_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16()
