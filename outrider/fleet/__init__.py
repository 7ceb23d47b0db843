"""Starts, supervises and upgrades the replicas of a deployment on Ray."""

from outrider.services import secure

secure()
