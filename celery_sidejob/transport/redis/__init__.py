"""The URLs `sidejob://`, `sidejobs://` and `sidejob-sentinel://`: kombu's Redis transport with reliable fetch."""
