"""``python -m dquantcodec`` is the command ``dqkv``."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
