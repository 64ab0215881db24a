"""Floor 3: a model whose stages are served by peers that come and go. Read `peer.py` first."""
