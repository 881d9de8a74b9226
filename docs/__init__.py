"""The documentation, and the tool that generates parts of it."""
