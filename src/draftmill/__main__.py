"""`python -m draftmill`: the same as the `draftmill` command."""

from draftmill.cli import main

if __name__ == "__main__":  # a spawned worker imports this module again
    main()
