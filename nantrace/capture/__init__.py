"""The module trace: hooks, sites, buffer, ledger and the `Tracer`. Has no opinion."""
