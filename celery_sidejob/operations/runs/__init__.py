"""The runs of jobs, from the claim to the end, including ends that the run does not make itself."""
