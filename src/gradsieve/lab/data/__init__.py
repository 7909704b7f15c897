"""Data for the workloads: read from what the user has, fetched into a cache, or on every machine already."""
