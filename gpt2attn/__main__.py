"""The program: `gpt2attn` and `python -m gpt2attn`."""

import os
import signal
from typing import NoReturn


def main() -> None:
    """Run the command line; see `cli`."""
    # Until the commands take over, and after them, there is nothing to tidy up, and Python's own
    # handler would show a traceback of whatever is being imported.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)
    from .cli import main as run

    run()


def _leave(number: int, frame: object) -> NoReturn:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
