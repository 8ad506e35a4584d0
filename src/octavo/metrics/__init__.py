"""Metrics: collect.py derives intervals from events, registry.py exposes them to Prometheus."""
