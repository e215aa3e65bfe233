"""Rings -> OTLP: metrics and spans, pushed to an OpenTelemetry collector by the exporter process."""
