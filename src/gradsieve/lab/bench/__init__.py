"""Benchmarks. All of them return a `report.Report`."""
