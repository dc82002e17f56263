"""Steps of a worker and of its consumer: they start our services, and stop them."""
