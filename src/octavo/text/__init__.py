"""Text in and out: tokenizers, incremental detokenising, chat templates."""
