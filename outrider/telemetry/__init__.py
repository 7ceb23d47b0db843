"""Traces, metrics and logs. Only processes that export traces or metrics import OpenTelemetry."""
