"""The shop's own tests: `python manage.py test`."""

from django.contrib.auth.models import User
from django.core import mail
from django.db import transaction
from django.test import TestCase, TransactionTestCase
from shop.celery import sidejob

from celery_sidejob.testing import assert_enqueued

from .models import Line, Order, Product, StockMove
from .tasks import OutOfStockError, fulfil, take_from_stock


class PlacingTest(TransactionTestCase):
    """Whole orders: their transactions really commit, so their jobs run."""

    def setUp(self):
        Product.objects.create(name="kettle", price="20.00", stock=5)

    def place(self, **lines):
        order = {"email": "ada@example.com", "lines": lines}
        return self.client.post("/orders/", order, content_type="application/json")

    def test_an_order_is_fulfilled(self):
        pk = self.place(kettle=2).json()["order"]
        self.assertEqual(self.client.get(f"/orders/{pk}/").json()["total"], "40.00")
        self.assertEqual(self.client.get(f"/orders/{pk}/receipt/").json(), {"total": "40.00"})
        self.assertEqual(Product.objects.get().stock, 3)
        self.assertEqual(sidejob.get(f"order-{pk}").status, "completed")
        self.assertCountEqual([message.subject.split()[0] for message in mail.outbox], ["Order", "Invoice"])

    def test_the_admin_shows_the_job(self):
        pk = self.place(kettle=1).json()["order"]
        self.client.force_login(User.objects.create_superuser("ada"))
        self.assertContains(self.client.get(f"/admin/orders/order/{pk}/change/"), "completed")


class PartsTest(TestCase):
    """What needs no commit. Inside Django's TestCase nothing commits: no job runs, and it is gone with the test."""

    def test_what_is_not_there_is_not_taken(self):
        kettle = Product.objects.create(name="kettle", price="20.00", stock=5)
        line = Line.objects.create(order=Order.objects.create(), product=kettle, quantity=6)
        with self.assertRaises(OutOfStockError):
            take_from_stock(line.pk)
        self.assertFalse(StockMove.objects.exists())

    def test_an_order_asks_for_its_job(self):
        Product.objects.create(name="kettle", price="20.00", stock=5)
        wanted = {"email": "ada@example.com", "lines": {"kettle": 2}}
        with self.captureOnCommitCallbacks(execute=True):
            placed = self.client.post("/orders/", wanted, content_type="application/json")
        assert_enqueued(fulfil, (placed.json()["order"],), transaction="default")
        self.assertEqual(len(mail.outbox), 1)  # `confirm` runs after the commit; `fulfil` waits in the transaction

    def test_a_job_is_there_only_if_the_order_is(self):
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            order = Order.objects.create(email="ada@example.com")
            job = fulfil.enqueue((order.pk,), transaction="default")
            raise ZeroDivisionError
        self.assertFalse(Order.objects.exists())
        self.assertFalse(job.exists)
