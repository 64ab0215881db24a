"""What a run bears: peers that die, are cut off, come late, are slow, or lie."""
