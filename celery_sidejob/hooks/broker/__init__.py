"""What we ask of the broker: giving it messages, and looking at what it has."""
