"""The form of the messages of jobs and durable tasks, and the limits of brokers."""
