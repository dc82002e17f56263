"""The tools of proof: real servers, real processes, a network that fails on request, and waiting for facts."""
