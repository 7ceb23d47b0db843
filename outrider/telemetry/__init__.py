"""Traces, metrics and logs: off, without importing OpenTelemetry, unless configured."""
