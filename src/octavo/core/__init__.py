"""Bookkeeping of the KV cache: blocks, tables, pools. Standard library only; no arrays, clock, logs or I/O."""
