"""Measurements and their reports."""

from outrider.services import secure

secure()
