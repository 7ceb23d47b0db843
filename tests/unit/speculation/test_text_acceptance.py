"""Acceptance of drafts whose ratios depend on where they begin."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.speculation.text_acceptance import acceptance_of_windows


def test_each_window_has_ratios_of_its_own() -> None:
    """Two texts, of which one has no window of two tokens."""
    texts = [[np.array([1.0, 0.5, 0.25]), np.array([0.2, 0.4])], [np.array([0.6])]]
    found = acceptance_of_windows(texts, 3)
    assert found[0] == pytest.approx((1.0 + 0.5 + 0.25 + 0.6) / 4)
    assert found[1] == pytest.approx((1.0 * 0.2 + 0.5 * 0.4) / (1.0 + 0.5))
    assert found[2] is None
