"""Products, orders and their lines; what was taken out of the stock, and what was invoiced."""

from django.db import models


class Product(models.Model):
    """Something the shop sells."""

    name = models.CharField(max_length=100, unique=True)
    price = models.DecimalField(max_digits=10, decimal_places=2)
    stock = models.IntegerField()

    def __str__(self):
        return self.name


class Order(models.Model):
    """What a customer has ordered. The job that fulfils it has the alias `job_alias`."""

    email = models.EmailField()
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self):
        return f"order {self.pk} of {self.email}"

    @property
    def job_alias(self):
        """By this name `sidejob.get()` and `celery -A shop sidejob show` find the order's job."""
        return f"order-{self.pk}"


class Line(models.Model):
    """Some pieces of one product in an order."""

    order = models.ForeignKey(Order, models.CASCADE, related_name="lines")
    product = models.ForeignKey(Product, models.PROTECT)
    quantity = models.PositiveIntegerField()


class StockMove(models.Model):
    """Pieces that were taken out of the stock; nothing but the job keeps a line from having two of these."""

    line = models.ForeignKey(Line, models.CASCADE, related_name="moves")
    quantity = models.PositiveIntegerField()


class Invoice(models.Model):
    """What the customer owes; nothing but the job keeps an order from having two of these."""

    order = models.ForeignKey(Order, models.CASCADE, related_name="invoices")
    total = models.DecimalField(max_digits=12, decimal_places=2)
