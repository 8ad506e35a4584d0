"""The engine: plan, run, apply, observe. In process for LLM, in its own process for the server."""
