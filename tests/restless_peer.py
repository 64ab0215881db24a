"""The command line, as a peer of a swarm that moves soon."""

from farflung.cli import main
from farflung.swarm import moves

if __name__ == "__main__":
    moves.STEADY_SECONDS, moves.STAY_SECONDS = 1.0, 2.0
    main()
