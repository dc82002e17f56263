"""A small shop: an order and the job that fulfils it are one transaction, in endpoints of both kinds."""
