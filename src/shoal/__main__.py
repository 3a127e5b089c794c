"""`python -m shoal` is the `shoal` command."""

from shoal.cli.main import run

if __name__ == "__main__":
    run()
