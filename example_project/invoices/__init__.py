"""Billing: invoices, revenue and the tax office."""
