"""The HTTP server: a translation layer between the OpenAI dialect and an AsyncEngine.

    app.py          create_app: the route list          serve.py       run it, with an engine process
    protocol.py     request bodies                      convert.py     bodies to native types
    completions.py  /v1/completions                     chat.py        /v1/chat/completions
    choices.py      engine deltas to text pieces        stream.py      pieces to HTTP, disconnects
    blocks.py       /debug/blocks, /reset_prefix_cache
    tokens.py       /tokenize, /detokenize              errors.py      exceptions to error bodies

No JSON, template or token text goes further in than this folder. Nothing imports it but the command line.
"""
