"""Announcements: what is told, after the commit, to those who listen at that moment, and kept for nobody else."""
