"""Makes the tables of the shop; a project has migrations instead."""

from orders.models import Model, engine

Model.metadata.create_all(engine)
