"""What a soak and a storm have in common: the servers, the processes, and what befalls them."""
