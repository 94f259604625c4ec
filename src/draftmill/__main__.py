"""`python -m draftmill`: the same as the `draftmill` command."""

from draftmill.cli import main

main()
