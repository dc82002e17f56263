"""The shop's addresses."""

from django.contrib import admin
from django.urls import path
from orders import views

urlpatterns = [
    path("orders/", views.place_order),
    path("orders/<int:pk>/", views.show_order),
    path("orders/<int:pk>/receipt/", views.show_receipt),
    path("admin/", admin.site.urls),
]
