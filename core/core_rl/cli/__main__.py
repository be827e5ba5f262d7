"""``python -m core_rl.cli``, the same as ``core-rl``."""

from core_rl.cli import main

main()
