"""Placing an order, and looking at it."""

import json

from celery.exceptions import TimeoutError as StillRunning
from django.db import transaction
from django.http import JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST
from shop.celery import sidejob

from .models import Line, Order, Product
from .tasks import confirm, fulfil


@csrf_exempt
@require_POST
def place_order(request):
    """Place the order ``{"email": …, "lines": {product: quantity}}``: its rows and its jobs, or nothing."""
    wanted = json.loads(request.body)
    products = Product.objects.in_bulk(wanted["lines"], field_name="name")
    if unknown := wanted["lines"].keys() - products.keys():
        return JsonResponse({"error": f"not sold here: {', '.join(sorted(unknown))}"}, status=400)
    with transaction.atomic():
        order = Order.objects.create(email=wanted["email"])
        lines = Line.objects.bulk_create(
            Line(order=order, product=products[name], quantity=quantity) for name, quantity in wanted["lines"].items()
        )
        job = fulfil.enqueue((order.pk,), aliases=[order.job_alias], transaction="default")
        job.input("lines").write_many([line.pk for line in lines], transaction="default")
        confirm.delay_on_commit(order.pk)
    return JsonResponse({"order": order.pk}, status=201)


@require_GET
def show_order(request, pk):
    """Show what has become of an order."""
    order = get_object_or_404(Order, pk=pk)
    invoice = order.invoices.first()
    job = sidejob.get(order.job_alias)
    return JsonResponse({"order": order.pk, "job": job.status, "total": invoice and str(invoice.total)})


@require_GET
def show_receipt(request, pk):
    """Show what the job of an order has returned; wait for it, but not for long."""
    order = get_object_or_404(Order, pk=pk)
    try:
        return JsonResponse({"total": sidejob.get(order.job_alias).result.get(timeout=10)})
    except StillRunning:
        return JsonResponse({"total": None}, status=202)
