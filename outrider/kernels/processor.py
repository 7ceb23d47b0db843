"""What the processor can compute with its own instructions."""

import torch


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 numbers with its own instructions (on x86-64,
    AVX-512 BF16 or AMX), and oneDNN may use them. Otherwise, products are emulated."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    capabilities = torch.cpu.get_capabilities()
    # On x86-64, oneDNN supports bfloat16 on every processor with AVX-512, but emulates it there if
    # the processor has neither of these instructions. On other processors, it emulates nothing.
    is_x86 = capabilities["architecture"] == "x86_64"
    return not is_x86 or bool(capabilities["avx512_bf16"] or capabilities["amx_bf16"])
