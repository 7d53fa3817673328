"""``semkv report``: one HTML page and a markdown file from the logs of sweeps.

`log` reads, `view` computes what is shown, `figures` draws, `page` and `markdown` write.
"""
