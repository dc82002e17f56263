"""Announcements: messages that are sent after a commit to the present listeners, and kept for no later listener."""
