"""Checkpoints: GGUF files and Hugging Face folders behind one interface, and where to find them by name."""
