"""The machine: one Protocol of operations (ops.py), an executable specification in NumPy, native kernels."""
