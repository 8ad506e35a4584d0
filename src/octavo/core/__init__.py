"""Bookkeeping of the KV cache: blocks, tables, pools. Standard library only; no arrays, clock or I/O."""
