"""What the messages of jobs and durable tasks look like, and what a broker can carry of them."""
