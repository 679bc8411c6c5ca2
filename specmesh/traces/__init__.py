"""Traces on disk: written as OTLP-JSON lines by each process, read back, drawn and exported."""
