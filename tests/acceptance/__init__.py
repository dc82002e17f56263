"""Real workers, a real Postgres, a real broker; killed, frozen and cut off at every instant that matters."""
