"""What becomes of an order, whatever dies meanwhile."""

from django.core.mail import send_mail
from django.db import connection, transaction
from django.db.models import DecimalField, F, Sum

from celery_sidejob import sidejob_task

from .models import Invoice, Line, Order, Product, StockMove

RESTOCKED_S = 60


class OutOfStockError(Exception):
    """There are fewer pieces than were ordered."""


@sidejob_task(inports=["lines"], max_retries=None)
def fulfil(job, order_id):
    """Take each line out of the stock, then write the invoice: each exactly once. Returns its total."""
    for line_id in job.for_inputs("lines"):
        with transaction.atomic():
            with job.unit(transaction=connection):
                try:
                    take_from_stock(line_id)
                except OutOfStockError as error:
                    raise job.retry(error, countdown=RESTOCKED_S) from error  # the line waits on its port meanwhile
    if "mail" not in job.children:  # else an earlier run has come to its end
        with transaction.atomic():
            with job.unit(transaction=connection):
                invoice = write_invoice(order_id)
                job.enqueue(send_invoice, (invoice.pk,), child_name="mail")
    return str(Invoice.objects.get(order=order_id).total)


@sidejob_task
def confirm(job, order_id):
    """Tell the customer that the order was placed. A mail is no row: it may come twice, if the worker dies here."""
    order = Order.objects.get(pk=order_id)
    send_mail(f"Order {order.pk}", "Thank you!", "shop@example.com", [order.email])


@sidejob_task
def send_invoice(job, invoice_id):
    """Send the invoice to the customer."""
    invoice = Invoice.objects.select_related("order").get(pk=invoice_id)
    send_mail(f"Invoice {invoice.pk}", f"Total: {invoice.total}", "shop@example.com", [invoice.order.email])


def take_from_stock(line_id):
    """Take a line's pieces out of the stock."""
    line = Line.objects.get(pk=line_id)
    enough = Product.objects.filter(pk=line.product_id, stock__gte=line.quantity)
    if not enough.update(stock=F("stock") - line.quantity):
        raise OutOfStockError(f"{line.product} x {line.quantity}")
    StockMove.objects.create(line=line, quantity=line.quantity)


def write_invoice(order_id):
    """Write an order's invoice."""
    price = F("product__price") * F("quantity")
    total = Line.objects.filter(order_id=order_id).aggregate(total=Sum(price, output_field=DecimalField()))["total"]
    return Invoice.objects.create(order_id=order_id, total=total or 0)
