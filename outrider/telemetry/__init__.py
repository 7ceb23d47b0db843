"""Traces, metrics and logs: all off, and no OpenTelemetry imported, unless asked for."""
