"""All rows that need a GPU, in one command: `python -m benchmarks.gpu` (`__main__.py`)."""
