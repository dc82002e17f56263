"""Orders in Django's admin, with what their jobs are doing."""

from django.contrib import admin
from shop.celery import sidejob

from .models import Invoice, Line, Order, Product


class LineInline(admin.TabularInline):
    """The lines of an order."""

    model = Line
    extra = 0


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    """An order and the status of its job."""

    inlines = [LineInline]
    readonly_fields = ["job"]

    @admin.display(description="job")
    def job(self, order):
        """Return the job's number and status, which is one more query: so not in the list."""
        job = sidejob.find(order.job_alias)
        return f"{job.id}: {job.status}" if job is not None else "none"


admin.site.register([Product, Invoice])
