"""CUDA devices that exist by name only."""

import threading

import pytest
import torch


def cuda_of(
    monkeypatch: pytest.MonkeyPatch, num_visible: int = 2
) -> list[tuple[int, torch.device]]:
    """Pretends that there are devices. Returns which thread chose which device, in order."""
    chosen: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.get_ident(), device))
    )
    return chosen
