"""What the instrument survives, and what the server does not notice.

``python -m tests.chaos`` (``make chaos``) runs all of it and writes the README's reliability table.
"""
