"""`python -m gpt2attn` is the same program as `gpt2attn`."""

from .cli import main

if __name__ == "__main__":
    main()
