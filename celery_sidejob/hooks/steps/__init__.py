"""Steps of a worker and of its consumer: what starts our services, and stops them."""
