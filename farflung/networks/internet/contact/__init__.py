"""Who is there, and how peers speak with each other: identities, the directory, handshakes, frames and streams."""
