"""`python -m farflung` is the command line."""

from farflung.cli import main

main()
