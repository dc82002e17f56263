"""The tables of the broker `sidejobpg://`: queues and bindings, messages, broadcasts, and consumers."""
