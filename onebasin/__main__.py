"""``python -m onebasin`` is the same program as ``onebasin``."""

from onebasin.cli.main import entry

if __name__ == "__main__":
    entry()
