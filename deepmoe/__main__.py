"""`python -m deepmoe` is `deepmoe`."""

from deepmoe.cli import main

main()
